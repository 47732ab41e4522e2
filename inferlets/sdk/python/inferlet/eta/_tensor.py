"""The tensor of a recorded epilogue: a handle whose value exists only on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from inferlet.eta._errors import EtaError

if TYPE_CHECKING:
    from inferlet.eta._recorder import GuestRecorder


class Tensor:
    """A value of the device program being recorded: dtype and shape are known, elements are not.

    Operators work element by element on shapes that broadcast as NumPy's do; a Python number takes the tensor's dtype.
    `/` is for f32, `//` and `%` round down as Python's; `& | ^ ~` are logical for bool and bitwise for integers; `==`
    compares.
    """

    __slots__ = ("_id", "_recorder", "_scope", "dtype", "shape")

    def __init__(self, recorder: GuestRecorder, scope: object, number: int, dtype: str, shape: tuple[int, ...]) -> None:
        self._recorder = recorder
        self._scope = scope
        self._id = number
        self.dtype = dtype
        self.shape = shape

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        count = 1
        for extent in self.shape:
            count *= extent
        return count

    @property
    def T(self) -> Tensor:
        """The transpose of a tensor of rank 2."""
        return self._recorder.apply("transpose", (self,), {})

    def cast(self, dtype: str) -> Tensor:
        """The values as "f32", "i32", "u32" or "bool"."""
        return self._recorder.apply("cast", (self,), {"dtype": dtype})

    astype = cast

    def reshape(self, *shape: Any) -> Tensor:
        """The same elements under another shape: `x.reshape(2, 3)` or `x.reshape((2, 3))`; one extent may be -1."""
        wanted = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape
        if wanted.count(-1) == 1:
            known = 1
            for extent in wanted:
                known *= abs(extent)
            wanted = tuple(self.size // max(known, 1) if extent == -1 else extent for extent in wanted)
        return self._recorder.apply("reshape", (self,), {"shape": wanted})

    def _binary(self, op: str, other: Any, swap: bool = False) -> Tensor:
        if not isinstance(other, Tensor | int | float | list | tuple):
            return NotImplemented
        return self._recorder.apply(op, (other, self) if swap else (self, other), {})

    def __add__(self, other: Any) -> Tensor:
        return self._binary("add", other)

    def __radd__(self, other: Any) -> Tensor:
        return self._binary("add", other, True)

    def __sub__(self, other: Any) -> Tensor:
        return self._binary("sub", other)

    def __rsub__(self, other: Any) -> Tensor:
        return self._binary("sub", other, True)

    def __mul__(self, other: Any) -> Tensor:
        return self._binary("mul", other)

    def __rmul__(self, other: Any) -> Tensor:
        return self._binary("mul", other, True)

    def __truediv__(self, other: Any) -> Tensor:
        self._float_division()
        return self._binary("div", other)

    def __rtruediv__(self, other: Any) -> Tensor:
        self._float_division()
        return self._binary("div", other, True)

    def __floordiv__(self, other: Any) -> Tensor:
        return self._binary("floor_div", other)

    def __rfloordiv__(self, other: Any) -> Tensor:
        return self._binary("floor_div", other, True)

    def __mod__(self, other: Any) -> Tensor:
        return self._binary("mod", other)

    def __rmod__(self, other: Any) -> Tensor:
        return self._binary("mod", other, True)

    def __pow__(self, other: Any) -> Tensor:
        return self._binary("pow", other)

    def __rpow__(self, other: Any) -> Tensor:
        return self._binary("pow", other, True)

    def __matmul__(self, other: Any) -> Tensor:
        batched = isinstance(other, Tensor) and other.ndim > 2
        return self._binary("batch_matmul" if batched else "matmul", other)

    def __neg__(self) -> Tensor:
        return self._recorder.apply("neg", (self,), {})

    def __pos__(self) -> Tensor:
        return self

    def __abs__(self) -> Tensor:
        return self._recorder.apply("abs", (self,), {})

    def __lt__(self, other: Any) -> Tensor:
        return self._binary("lt", other)

    def __le__(self, other: Any) -> Tensor:
        return self._binary("le", other)

    def __gt__(self, other: Any) -> Tensor:
        return self._binary("gt", other)

    def __ge__(self, other: Any) -> Tensor:
        return self._binary("ge", other)

    def __eq__(self, other: Any) -> Tensor:  # type: ignore[override]
        return self._compare("eq", other)

    def __ne__(self, other: Any) -> Tensor:  # type: ignore[override]
        return self._compare("ne", other)

    def _compare(self, op: str, other: Any) -> Tensor:
        made = self._binary(op, other)
        if made is NotImplemented:  # Python would quietly compare identities instead
            raise EtaError(f"{self!r} is compared with {other!r:.60}, which is neither a tensor nor a number")
        return made

    def __hash__(self) -> int:
        self._unknown("a tensor as a key or in a set", "equality is known on the device only; use a list or its index")

    def __and__(self, other: Any) -> Tensor:
        return self._binary("and" if self.dtype == "bool" else "bit_and", other)

    def __rand__(self, other: Any) -> Tensor:
        return self.__and__(other)

    def __or__(self, other: Any) -> Tensor:
        return self._binary("or" if self.dtype == "bool" else "bit_or", other)

    def __ror__(self, other: Any) -> Tensor:
        return self.__or__(other)

    def __xor__(self, other: Any) -> Tensor:
        return self._binary("xor" if self.dtype == "bool" else "bit_xor", other)

    def __lshift__(self, other: Any) -> Tensor:
        return self._binary("shift_left", other)

    def __rshift__(self, other: Any) -> Tensor:
        return self._binary("shift_right", other)

    def __invert__(self) -> Tensor:
        return self._recorder.apply("not" if self.dtype == "bool" else "bit_not", (self,), {})

    def __getitem__(self, key: Any) -> Tensor:
        """`x[3]`, `x[-1]`, `x[2:5]`, `x[0, ::2]` are cut when recorded; `x[indices]` gathers along the first axis."""
        if isinstance(key, Tensor):
            if key.dtype == "bool":
                raise EtaError("a bool mask cannot index, its count is unknown when recorded; use select(mask, x, 0)")
            return self._recorder.apply("gather", (self, key), {})
        keys = key if isinstance(key, tuple) else (key,)
        if len(keys) > self.ndim:
            raise EtaError(f"{len(keys)} indices for {self!r}")
        x, axis = self, 0
        for part in keys:
            extent = x.shape[axis]
            if isinstance(part, slice):
                start, stop, step = part.indices(extent)
                if step < 0:
                    x = x._recorder.apply("flip", (x,), {"axis": axis})
                    start, stop, step = extent - 1 - start, extent - 1 - stop, -step
                if (start, stop, step) != (0, extent, 1):
                    x = x._recorder.apply("slice", (x,), {"start": start, "stop": stop, "axis": axis, "step": step})
                axis += 1
            elif isinstance(part, int) and not isinstance(part, bool):
                if not -extent <= part < extent:
                    raise EtaError(f"index {part} is outside dimension {axis} of {self!r}")
                at = part % extent
                x = x._recorder.apply("slice", (x,), {"start": at, "stop": at + 1, "axis": axis})
                x = x.reshape(x.shape[:axis] + x.shape[axis + 1 :])
            else:
                raise EtaError(f"{self!r} is indexed by ints, slices or one int tensor, not by {part!r:.60}")
        return x

    def __repr__(self) -> str:
        return f"Tensor({self.dtype}[{', '.join(map(str, self.shape))}])"

    def _unknown(self, what: str, instead: str) -> NoReturn:
        raise EtaError(f"{what}: {self!r} has no value yet, the epilogue runs later, on the device; {instead}")

    def _float_division(self) -> None:
        if self.dtype != "f32":
            raise EtaError(f"/ is for f32, and this is {self!r}: use // to round down, div(x, y) to truncate, or cast")

    def __bool__(self) -> bool:
        self._unknown("a condition was asked of a tensor", "choose with select(condition, x, y) instead of if")

    def __len__(self) -> int:
        self._unknown("len() of a tensor", "its extents are in x.shape")

    def __iter__(self) -> Any:
        self._unknown("a tensor cannot be iterated", "index it: [x[i] for i in range(x.shape[0])]")

    def __contains__(self, item: object) -> bool:
        self._unknown("`in` of a tensor", "use reduce_any(x == item)")

    def __int__(self) -> int:
        self._unknown("int() of a tensor", "use cast(x, 'i32'), or return it and await the Output")

    def __index__(self) -> int:
        self._unknown("a tensor as a Python integer", "shapes are fixed when recorded; use gather to index")

    def __float__(self) -> float:
        self._unknown("float() of a tensor", "use cast(x, 'f32'), or return it and await the Output")

    def __round__(self, digits: int | None = None) -> Tensor:
        return self._recorder.apply("round", (self,), {})

    def __await__(self) -> Any:
        self._unknown("await of a tensor", "return it from the epilogue and await the Output")
