"""The benchmarks behind README.md's and RECORDS.md's figures; python -m benchmarks lists them."""
