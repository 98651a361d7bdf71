"""Rows of Parquet files, read by index from anywhere."""
