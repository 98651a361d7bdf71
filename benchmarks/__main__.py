"""List the benchmarks."""

import ast
from pathlib import Path


def main() -> None:
    for path in sorted(Path(__file__).parent.glob("[!_]*.py")):
        first_line = ast.get_docstring(ast.parse(path.read_text())).splitlines()[0]
        print(f"python -m benchmarks.{path.stem:16}  {first_line}")


if __name__ == "__main__":
    main()
