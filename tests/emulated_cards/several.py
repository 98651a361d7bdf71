"""Run main(argv) of several scripts on emulated cards, each in a process forked from this one.

    python emulate.py several.py PLAN

PLAN is a file of JSON: for each run a name, a module and a list of arguments. Each run leaves
NAME.0.json beside it, as emulate.py describes.
"""

import importlib
import json
import os
import sys
import traceback
from pathlib import Path

import trainkit  # noqa: F401

import accelerate  # noqa: F401  imported once, before the forks
import emulate
import torch  # noqa: F401

plan = Path(sys.argv[1])
for name, module, arguments in json.loads(plan.read_text()):
    process = os.fork()
    if not process:
        emulate.cards.forked = False  # nothing has used a card yet
        code = 1
        try:
            importlib.import_module(module).main(arguments)
            code = 0
        except BaseException:
            traceback.print_exc()
        emulate.ledger.write(str(plan.parent / name))
        sys.stdout.flush()
        os._exit(code)
    if os.waitpid(process, 0)[1]:
        sys.exit(f"{name} failed")
