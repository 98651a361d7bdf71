"""Data sets: what one sample is, read from pictures, tables and Parquet files."""
