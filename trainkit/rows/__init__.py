"""Rows of Parquet files by index, from anywhere, for data larger than the memory or the disk.

All is in parquet.py: begin with ParquetRows, the data set; LaneOrder is the order in which its rows
are drawn. It uses the places and the orders of the core, and no other wing.
"""

from trainkit.fronts import hand_out

# The module of each name. Imported late, because pyarrow and fsspec take time.
NAMES = {
    "LaneOrder": "rows.parquet",
    "ParquetRows": "rows.parquet",
    "shown": "rows.parquet",
    "EVALUATED": "reading.splits",
    "describe_given": "reading.splits",
}

__getattr__ = hand_out(__name__, NAMES, "trainkit")
