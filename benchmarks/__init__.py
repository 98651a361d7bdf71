"""What the figures of README.md and RECORDS.md come from; python -m benchmarks lists them."""
