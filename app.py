"""Use a trained model in the browser, on this machine and without a network.

python app.py runs/mnist

It is trainkit/app.py, which `python -m trainkit.app` runs in any folder.
"""

from trainkit import startup

from trainkit.app import main

if __name__ == "__main__":
    startup.run(main)
