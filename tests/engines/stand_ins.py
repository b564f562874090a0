"""Write stand-ins for two compiled packages that SGLang imports, but does not need to serve a small model on a CPU.

Run by install.sh in SGLang's own environment. A stand-in can be imported, and whatever is taken from it raises when it
is called, so nothing is computed wrongly in silence.
"""

import sysconfig
from pathlib import Path

VERSIONS = {"sgl_kernel": "0.4.10", "torchvision": "0.28.0"}
SOURCE = '''"""Stand-in: it can be imported, and whatever is taken from it raises when it is called."""

import importlib.abc
import importlib.machinery
import sys
import types

__version__ = "{version}"
__path__ = []


class _Missing(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{{cls.__name__}}.{{name}}"

    def __call__(cls, *args, **kwargs):
        raise RuntimeError(f"{{cls.__module__}}.{{cls.__name__}} is not installed here, only a stand-in is")


def _getattr_of(module):
    def get(name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(name, (), {{"__module__": module}})

    return get


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.startswith(__name__ + "."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__path__ = []
        module.__getattr__ = _getattr_of(spec.name)
        return module

    def exec_module(self, module):
        pass


sys.meta_path.append(_Finder())
__getattr__ = _getattr_of(__name__)
'''

if __name__ == "__main__":
    for name, version in VERSIONS.items():
        package = Path(sysconfig.get_paths()["purelib"]) / name
        package.mkdir(exist_ok=True)
        (package / "__init__.py").write_text(SOURCE.format(version=version))
