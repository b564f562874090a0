"""A plugin of pytest that gives this process a CUDA device that computes nothing, before anything imports torch.

Not here: building the library (test_fake_cuda.py), what is traced on the device (device.py).
"""

from __future__ import annotations

import ctypes
import os
import sys

assert "torch" not in sys.modules, "torch keeps the hooks that it finds at its first look"
ctypes.CDLL(os.environ["FAKE_CUDA_LIBRARY"])
