"""Tensors "on cuda" without values: what a step does to a GPU is traced, and nothing is computed.

Not here: the library behind the device (fake_cuda.cpp), models and backends on it (models.py).

    with fake_cuda() as trace:          FakeTensorMode below, a trace of all operations above
        backend.forward_backward(...)
    trace.waits                         what made the host wait for the GPU
    trace.uploads                       copies to the GPU that the host waits for: blocking, or of memory not pinned
    trace.peak                          bytes of the storages that lived at the same time on the GPU, at most

Small tensors that come from the host keep their values beside them, and what is computed of such tensors alone has
values too: so a mask says how many positions it has, and indexing by it has a shape. All else has no values. The host
reads 1 from it.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import masking_utils

aten = torch.ops.aten
READS = (aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default, aten.allclose.default)
"""Operations that give the host a number."""
DYNAMIC = (aten.nonzero.default, aten.masked_select.default, aten._unique2.default, aten.repeat_interleave.Tensor)
"""Operations whose result has a shape that only the values say, so that the host waits for it."""
COPIES = (aten._to_copy.default, aten.copy_.default)
GATHER = torch.ops.c10d._allgather_base_.default
MAX_KNOWN = 1 << 22
"""Elements of the largest tensor that keeps its values."""


class Trace(TorchDispatchMode):
    """Every operation on the fake device, and what lives on it; used with `fake_cuda`."""

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self.mode = mode
        self.waits: Counter[str] = Counter()
        """How often the host waited, by the operation that it waited for."""
        self.uploads = 0
        """Copies to the device that were not asked for as non_blocking, or not of pinned memory."""
        self.num_pinned = 0
        """Tensors that were made in pinned memory of the host."""
        self.num_gathers = 0
        """How often weights were gathered from all ranks."""
        self.shapes: Counter[tuple[int, ...]] = Counter()
        """Shapes of what was allocated on the device."""
        self.num_bytes = self.peak = 0
        self._values: Any = WeakTensorKeyDictionary()  # Any: it has no types for its keys
        self._pinned: Any = WeakTensorKeyDictionary()
        self._living: set[int] = set()

    def start_peak(self) -> None:
        """Forget earlier peaks, waits, uploads, gathers and shapes; what lives stays counted."""
        self.peak = self.num_bytes
        self.waits.clear()
        self.shapes.clear()
        self.uploads = self.num_gathers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # most calls are this one
        args, given = tree_map(self._without_values, (args, kwargs or {}))
        if func is aten._pin_memory.default:
            return self._pin(args[0])
        self._note_copy(func, args, given)
        self.num_gathers += func is GATHER
        known = self._compute_known(func, args, given)
        if func in (*READS, *DYNAMIC) and any(isinstance(each, FakeTensor) for each in tree_leaves(args)):
            self._note_wait(str(func), is_on_device=self._is_on_device(args))
            return self._read(func, args, known)
        if func in (aten.index.Tensor, aten.index_put_.default, aten._index_put_impl_.default, aten.index_put.default):
            args = self._with_numbers(func, args)
        made = func(*args, **given)
        if known is not None and isinstance(made, Tensor):
            self._values[made] = known
        if given.get("pin_memory"):
            self.num_pinned += 1
            self._pinned[made] = True
        self._count(made)
        return made

    def read_list(self, tensor: Tensor) -> list[float]:
        """What `tolist` gives of a tensor of one dimension: its numbers come in one transfer."""
        self._note_wait("tolist", is_on_device=tensor.device.type == "cuda")
        known = self._values.get(tensor)
        return [1.0] * len(tensor) if known is None else known.tolist()

    def _note_wait(self, what: str, *, is_on_device: bool) -> None:
        if is_on_device:
            self.waits[what] += 1

    def _pin(self, tensor: Tensor) -> Tensor:
        """A copy in pinned memory, which a torch for the CPU cannot make."""
        self.num_pinned += 1
        made = torch.empty(tensor.shape, dtype=tensor.dtype)
        self._pinned[made] = True
        if (known := self._values.get(tensor)) is not None:
            self._values[made] = known
        return made

    def _read(self, func: Any, args: Any, known: Any) -> Any:
        if func in READS:
            return 1 if known is None else known
        assert known is not None, f"the shape of what {func} gives depends on what the model computes"
        return self._with_values(known, "cuda" if self._is_on_device(args) else "cpu")

    def _with_values(self, values: Any, device: str) -> Any:  # Any: a tensor or a tuple of them
        if not isinstance(values, Tensor):
            return tuple(self._with_values(each, device) for each in values)
        made = torch.empty(values.shape, dtype=values.dtype, device=device)
        self._values[made] = values
        self._count(made)
        return made

    def _with_numbers(self, func: Any, args: Any) -> Any:
        """The arguments of indexing with numbers in place of masks: a GPU finds them first, and the host waits."""
        source, indices, *others = args
        if not self._is_on_device(source) or all(each is None or each.dtype != torch.bool for each in indices):
            return args
        numbers: list[Tensor | None] = []
        for index in indices:
            if index is None or index.dtype != torch.bool:
                numbers.append(index)
                continue
            self.waits[f"{func} by a mask"] += 1
            values = self._values.get(index)
            assert values is not None, f"{func} by a mask that depends on what the model computes"
            with torch.utils._python_dispatch._disable_current_modes():
                found = values.nonzero(as_tuple=True)
            numbers += [self._with_values(each, "cuda") for each in found]
        return (source, numbers, *others)

    def _compute_known(self, func: Any, args: Any, given: Any) -> Any:
        """What an operation gives on the host, if all its tensors are known and it changes none; else None."""
        tensors = [each for each in tree_leaves((args, given)) if isinstance(each, Tensor)]
        if not tensors or func._schema.is_mutable or "detach" in str(func):
            return None
        values = [self._values.get(each) for each in tensors]
        if any(value is None for value in values):
            return None
        found = iter(values)
        flat, form = tree_flatten((args, {**given, **({"device": "cpu"} if "device" in given else {})}))
        flat = [next(found) if isinstance(each, Tensor) else each for each in flat]
        host_args, host_given = torch.utils._pytree.tree_unflatten(flat, form)
        host_given = {name: value for name, value in host_given.items() if name not in ("pin_memory", "layout")}
        with torch.utils._python_dispatch._disable_current_modes():
            computed = func(*host_args, **host_given)
        is_small = isinstance(computed, Tensor) and computed.numel() <= MAX_KNOWN
        return computed if is_small or not isinstance(computed, Tensor | tuple | list) else None

    def _without_values(self, value: Any) -> Any:  # Any: an argument of any type
        """A fake tensor in place of one with values, which are kept beside it if they are few."""
        if not isinstance(value, Tensor) or isinstance(value, FakeTensor):
            return value
        fake = self.mode.from_tensor(value)
        if value.numel() <= MAX_KNOWN and not value.requires_grad:
            self._values[fake] = value
        return fake

    def _note_copy(self, func: Any, args: Any, given: Any) -> None:
        if func not in COPIES:
            return
        source = args[1] if func is aten.copy_.default else args[0]
        target = args[0].device if func is aten.copy_.default else torch.device(given.get("device") or source.device)
        is_blocking = not (given.get("non_blocking") or (func is aten.copy_.default and len(args) > 2 and args[2]))
        if source.device.type == "cpu" and target.type == "cuda":
            self.uploads += is_blocking or source not in self._pinned
        if source.device.type == "cuda" and target.type == "cpu" and is_blocking:
            self.waits["copy to the host"] += 1

    @staticmethod
    def _is_on_device(args: Any) -> bool:
        return any(isinstance(each, Tensor) and each.device.type == "cuda" for each in tree_leaves(args))

    def _count(self, made: Any) -> None:
        for tensor in tree_leaves(made):
            if not isinstance(tensor, Tensor) or tensor.device.type != "cuda":
                continue
            storage = tensor.untyped_storage()
            if storage._cdata in self._living:
                continue
            self._living.add(storage._cdata)
            self.shapes[tuple(tensor.shape)] += 1
            self.num_bytes += storage.nbytes()
            self.peak = max(self.peak, self.num_bytes)
            weakref.finalize(storage, self._free, storage._cdata, storage.nbytes())

    def _free(self, storage: int, num_bytes: int) -> None:
        self._living.discard(storage)
        self.num_bytes -= num_bytes


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`scaled_dot_product_attention` by the kernels that a GPU takes, which a torch for the CPU would not choose.

    In half precision without a mask that is flash attention, else the memory-efficient kernel.
    """
    if torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        attn_mask = None if attn_mask is None else attn_mask.to(dtype)
    if attn_mask is None and query.dtype != torch.float32:
        return aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
    if enable_gqa:
        key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], dim=1) for each in (key, value))
    bias = None if attn_mask is None else attn_mask.expand(*query.shape[:-1], key.shape[-2])
    return aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, True, dropout_p, is_causal, scale=scale
    )[0]


@contextmanager
def fake_cuda(*, num_gpus: int = 1, capability: tuple[int, int] = (9, 0)) -> Iterator[Trace]:
    """A block in which `cuda` is a device without values, and torch says that it is there."""
    with ExitStack() as stack:
        for name, answer in {
            "is_available": True,
            "device_count": num_gpus,
            "current_device": 0,
            "set_device": None,
            "synchronize": None,
            "empty_cache": None,
            "get_device_capability": capability,
            "is_bf16_supported": True,
            "get_rng_state": torch.zeros(16, dtype=torch.uint8),
            "current_stream": mock.MagicMock(),
            "Stream": mock.MagicMock(),
            "stream": mock.MagicMock(),
            "Event": mock.MagicMock(),
            "manual_seed": None,
            "manual_seed_all": None,
        }.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, lambda *_, answer=answer, **__: answer))
        stack.enter_context(mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", attend))
        # To trace a general graph, transformers would make a mask for rows of one sample, too.
        stack.enter_context(mock.patch.object(masking_utils, "is_tracing", lambda *_: False))
        mode = stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        trace = stack.enter_context(Trace(mode))
        stack.enter_context(mock.patch.object(FakeTensor, "tolist", lambda tensor: trace.read_list(tensor)))
        yield trace


def squares(trace: Trace, length: int) -> Sequence[tuple[int, ...]]:
    """The allocated shapes that hold something for each pair of positions."""
    return [shape for shape in trace.shapes if shape[-2:] == (length, length)]
