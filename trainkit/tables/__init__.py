"""Tables: rows whose columns are read as numbers, dates and categories, and the network for them.

Begin with sets.py, which reads a table and splits it; columns.py says how a column becomes numbers,
network.py is the model, and predictions.py writes what a finished run says of new rows. It uses
reading/ and the flags and sets of the core, and no other wing. Scripts import the names below from
here.
"""

from trainkit.fronts import hand_out

# The file of each name. Imported late, because predict.py does not train, and pandas takes time.
NAMES = {
    "Column": "columns",
    "encode": "columns",
    "TabM": "network",
    "choose_sizes": "network",
    "set_scale": "network",
    "start_linear": "network",
    "TableClassifier": "predictions",
    "TablePredictor": "predictions",
    "write_answers": "predictions",
    "measure_classes": "scores",
    "measure_numbers": "scores",
    "TABLE_FLAGS": "sets",
    "TableConfig": "sets",
    "TableSets": "sets",
    "Widths": "sets",
    "make_number_sets": "sets",
    "make_table_sets": "sets",
}

__getattr__ = hand_out(__name__, NAMES)
