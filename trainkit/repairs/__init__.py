"""What belongs to torch, Accelerate and Python: private names that are read, methods replaced.

Every room may import it, it imports none, and no other room may touch a private name of another
package: tests/test_private.py. Begin with the module docstring of replaced.py.
"""
