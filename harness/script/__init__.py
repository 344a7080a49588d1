"""A failing case as one Python file that needs torch, numpy and the kernel's package, and nothing of ours.

1. The file makes the very bytes of the case: by a recipe of a few lines where that gives them, else from the file itself.
   The recipe is run before it is trusted.
2. Its reference is plain torch in fp64; its limits are numbers, derived from the case's data when the file was written.
3. It exits 1 where the fault is present, 0 where it is not, and prints expected and actual.
4. Kernels of others are called by their own public function. Ours come along: the kernel as readable source, what
   calls it packed.
"""

from harness.script.text import write_script

__all__ = ["write_script"]
