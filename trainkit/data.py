"""The place that some modules had before; it stays for one release."""

raise ImportError(
    "trainkit.data has gone: pictures, photos, backbones, decoding and folders are in "
    "trainkit.pictures, tables in trainkit.tables, texts and encoders in trainkit.texts, "
    "conversations, preferences and packing in trainkit.language, rows in trainkit.rows, and what "
    "they share in trainkit.reading"
)
