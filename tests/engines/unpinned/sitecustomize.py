"""Lets SGLang's adapters run without a GPU: torch pins no memory there, and the copy is as good.

Python imports this at its start if the folder is in PYTHONPATH.
"""

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class UnpinnedTorch(importlib.abc.MetaPathFinder):
    """Changes torch once it was imported."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Nothing for other modules than torch."""
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        found = importlib.util.find_spec("torch")
        assert found is not None and found.loader is not None
        run = found.loader.exec_module

        def run_and_change(module: ModuleType) -> None:
            run(module)
            leave_unpinned(module)

        found.loader.exec_module = run_and_change  # type: ignore[method-assign]
        return found


def leave_unpinned(torch: Any) -> None:  # Any: the module of another environment
    """Make calls that pin memory return what they would pin."""

    def without(create: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *values, pin_memory=False, **options: create(*values, **options)

    torch.Tensor.pin_memory = lambda tensor, *_: tensor
    for name in ("tensor", "empty", "zeros", "full"):
        setattr(torch, name, without(getattr(torch, name)))


sys.meta_path.insert(0, UnpinnedTorch())
