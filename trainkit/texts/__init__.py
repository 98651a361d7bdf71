"""Texts with a class each: as bags of words and n-grams of letters, or for a pretrained encoder.

Begin with texts.py, which reads them from a table and splits them; bags.py and encoders.py are the
two kinds of models. It uses reading/ and the flags and sets of the core, and no other wing. Scripts
import the names below from here.
"""

from trainkit.fronts import hand_out

# The file of each name. Imported late, because pandas and transformers take time.
NAMES = {
    "Bag": "bags",
    "weigh": "bags",
    "check_tokens": "encoders",
    "make_encoder": "encoders",
    "read_encoder": "encoders",
    "write_results": "encoders",
    "TextPredictor": "predictor",
    "TextConfig": "texts",
    "choose_order": "texts",
    "fit_bag": "texts",
    "make_samples": "texts",
    "read_docstrings": "texts",
    "read_sets": "texts",
}

__getattr__ = hand_out(__name__, NAMES)
