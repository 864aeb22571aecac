"""Functions that are parts of others: compiled with each of these, and never by themselves.

Numba optimizes every function, makes machine code of it, and does both again in every caller that it is linked into.
"""

from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler


class _Part(JITCodeLibrary):
    """The code of a part, as it is linked into callers. There is no machine code of it that could be called."""

    def _optimize_final_module(self):
        """Left to the entry point."""

    def _finalize_final_module(self):
        self._finalize_dynamic_globals()
        self._finalized = True

    def get_pointer_to_function(self, name):
        self._ensure_finalized()
        return 0

    @property
    def codegen(self):
        return self

    def set_env(self, name, environment):
        """What Python needs to call a function, which nobody does."""


class PartCompiler(Compiler):
    """Numba's own passes, for a part."""

    def define_pipelines(self):
        code = self.state.targetctx.codegen()
        self.state.library = _Part(code, self.state.func_id.func_qualname)
        return super().define_pipelines()
