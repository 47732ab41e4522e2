"""Component-model values and host functions through wasmtime's C API, without wasmtime-py's own converters.

The converters are chosen once, when the linker is built: a call costs 1-2 us instead of 14, a list of 1000 u32 35 us
instead of 740. No Python exception leaves a callback: wasmtime-py keeps "the last exception" in a process-wide global,
which mixes up threads.

Ownership (wasmtime/component/val.h): arguments are lent to a callback; results are written into memory the caller owns,
so what they point at is allocated by wasmtime's own allocators.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import addressof, c_size_t, c_void_p, string_at
from typing import Any

import numpy as np
from wasmtime import _ffi as ffi

Val = ffi.wasmtime_component_val_t
VAL_BYTES = ctypes.sizeof(Val)
_OF = Val.of.offset  # the payload's offset in a value; a `size_t` pair (size, data) for strings and lists

_BOOL = ffi.WASMTIME_COMPONENT_BOOL.value
_U32 = ffi.WASMTIME_COMPONENT_U32.value
_U64 = ffi.WASMTIME_COMPONENT_U64.value
_STRING = ffi.WASMTIME_COMPONENT_STRING.value
_LIST = ffi.WASMTIME_COMPONENT_LIST.value
_RESULT = ffi.WASMTIME_COMPONENT_RESULT.value

_U32_LIST = np.dtype({"names": ["kind", "value"], "formats": ["u1", "<u4"], "offsets": [0, _OF], "itemsize": VAL_BYTES})

_dll = ffi.dll
# PYFUNCTYPE keeps the GIL: giving it up costs more than each of these tiny calls, and lets busy threads in between.
_list_new = ctypes.PYFUNCTYPE(None, c_void_p, c_size_t)(("wasmtime_component_vallist_new_uninit", _dll))
_bytes_new = ctypes.PYFUNCTYPE(None, c_void_p, c_size_t, ctypes.c_char_p)(("wasm_byte_vec_new", _dll))
_val_new = ctypes.PYFUNCTYPE(c_void_p, c_void_p)(("wasmtime_component_val_new", _dll))
_val_delete = ctypes.PYFUNCTYPE(None, c_void_p)(("wasmtime_component_val_delete", _dll))
_error_new = ctypes.PYFUNCTYPE(c_void_p, ctypes.c_char_p)(("wasmtime_error_new", _dll))

_u8_at = ctypes.c_uint8.from_address
_u32_at = ctypes.c_uint32.from_address
_u64_at = ctypes.c_uint64.from_address
_size_at = c_size_t.from_address

Reader = Callable[[int], Any]  # address of a value -> Python
Writer = Callable[[int, Any], None]  # address of a value, Python -> None

MAX_TEXT_BYTES = 16 << 20
MAX_LIST_ITEMS = 1 << 20


class TooLarge(Exception):
    """A guest passed more than a host call takes."""


# -- readers -----------------------------------------------------------------------------------------------------------


def read_bool(at: int) -> bool:
    return bool(_u8_at(at + _OF).value)


def read_u32(at: int) -> int:
    return _u32_at(at + _OF).value


def read_u64(at: int) -> int:
    return _u64_at(at + _OF).value


def read_string(at: int) -> str:
    size = _size_at(at + _OF).value
    if size > MAX_TEXT_BYTES:
        raise TooLarge(f"a text of {size} bytes in one host call; at most {MAX_TEXT_BYTES}")
    return string_at(_size_at(at + _OF + 8).value, size).decode()


def read_u32_list(at: int) -> list[int]:
    count = _size_at(at + _OF).value
    if count > MAX_LIST_ITEMS:
        raise TooLarge(f"a list of {count} items in one host call; at most {MAX_LIST_ITEMS}")
    if count == 0:
        return []
    raw = (ctypes.c_char * (count * VAL_BYTES)).from_address(_size_at(at + _OF + 8).value)
    items: list[int] = np.frombuffer(memoryview(raw).cast("B"), _U32_LIST)["value"].tolist()
    return items


def read_option(inner: Reader) -> Reader:
    def read(at: int) -> Any:
        some = _size_at(at + _OF).value
        return inner(some) if some else None

    return read


def read_result_string(at: int) -> tuple[bool, str]:
    """A `result<string, string>`, of any size: (is ok, text)."""
    payload = _size_at(at + _OF + 8).value
    text = string_at(_size_at(payload + _OF + 8).value, _size_at(payload + _OF).value).decode()
    return bool(_u8_at(at + _OF).value), text


# -- writers -----------------------------------------------------------------------------------------------------------


def write_u32(at: int, value: int) -> None:
    _u8_at(at).value = _U32
    _u32_at(at + _OF).value = value


def write_u64(at: int, value: int) -> None:
    _u8_at(at).value = _U64
    _u64_at(at + _OF).value = value


def write_string(at: int, value: str) -> None:
    data = value.encode("utf-8", "backslashreplace")
    _u8_at(at).value = _STRING
    _bytes_new(at + _OF, len(data), data)


def write_u32_list(at: int, value: Sequence[int]) -> None:
    items = np.asarray(value, np.uint32)
    _u8_at(at).value = _LIST
    _list_new(at + _OF, len(items))
    if len(items):
        raw = (ctypes.c_char * (len(items) * VAL_BYTES)).from_address(_size_at(at + _OF + 8).value)
        cells = np.frombuffer(memoryview(raw).cast("B"), _U32_LIST)
        cells["kind"] = _U32
        cells["value"] = items


class Refused(Exception):
    """Makes a writer of `write_result` give the err case with this text."""


def write_result(ok: Writer | None) -> Writer:
    """A `result<T, string>`; `ok` None: `result<_, string>`. A `Refused` instance gives the err case."""

    def write(at: int, value: Any) -> None:
        payload = 0
        inner = Val()
        refused = isinstance(value, Refused)
        if refused:
            write_string(addressof(inner), str(value))
            payload = _val_new(addressof(inner))
        elif ok is not None:
            ok(addressof(inner), value)
            payload = _val_new(addressof(inner))
        _u8_at(at).value = _RESULT
        _u8_at(at + _OF).value = not refused
        _size_at(at + _OF + 8).value = payload or 0

    return write


def new_string(value: str) -> Any:
    """A string value that the caller owns; give it to `delete`."""
    val = Val()
    write_string(addressof(val), value)
    return val


def delete(val: Any) -> None:
    _val_delete(addressof(val))


def new_error(message: str) -> int:
    """A `wasmtime_error_t*` that traps the guest; wasmtime takes it over."""
    error: int = _error_new(message.encode("utf-8", "backslashreplace").replace(b"\0", b"?"))
    return error


# -- host functions ----------------------------------------------------------------------------------------------------

_Callback = ctypes.CFUNCTYPE(c_size_t, c_size_t, c_size_t, c_size_t, c_size_t, c_size_t, c_size_t, c_size_t)
_AsyncCallback = ctypes.CFUNCTYPE(None, *([c_size_t] * 9))
_add_func = ctypes.CFUNCTYPE(c_void_p, c_void_p, ctypes.c_char_p, c_size_t, _Callback, c_void_p, c_void_p)(
    ("wasmtime_component_linker_instance_add_func", _dll)
)
_add_func_async = ctypes.CFUNCTYPE(c_void_p, c_void_p, ctypes.c_char_p, c_size_t, _AsyncCallback, c_void_p, c_void_p)(
    ("wasmtime_component_linker_instance_add_func_async", _dll)
)
_Continue = ctypes.CFUNCTYPE(ctypes.c_bool, c_size_t)
_Finalize = ctypes.CFUNCTYPE(None, c_size_t)


class Functions:
    """Host functions of one linker; keeps their callbacks alive, so it must live as long as the linker.

    Args:
        on_fault: told about every exception that no err string can carry, before the guest is trapped.
    """

    def __init__(self, on_fault: Callable[[BaseException], str]) -> None:
        self._on_fault = on_fault
        self._keep: list[object] = []
        self._calls: dict[int, tuple[Blocking, int, int]] = {}  # suspended calls: (call, results, error slot)
        self._next = 0
        self._continue = _Continue(self._resume)
        self._finalize = _Finalize(self._forget)
        self._continue_at = ctypes.cast(self._continue, c_void_p).value or 0
        self._finalize_at = ctypes.cast(self._finalize, c_void_p).value or 0

    @property
    def suspended(self) -> int:
        return len(self._calls)

    def add(
        self,
        instance: Any,
        name: str,
        params: Sequence[Reader],
        result: Writer | None,
        function: Callable[..., Any],
        *,
        refusable: bool = False,
    ) -> None:
        """Define a function that returns at once.

        Args:
            refusable: `result` is a `write_result`, which then also says what was too large to read.
        """
        offsets = [(reader, index * VAL_BYTES) for index, reader in enumerate(params)]

        def callback(_env: int, _ctx: int, _ty: int, args: int, _nargs: int, results: int, _nresults: int) -> int:
            try:
                try:
                    values = [reader(args + offset) for reader, offset in offsets]
                except TooLarge as error:
                    if not refusable:
                        raise
                    value: Any = Refused(f"{name}: {error}")
                else:
                    value = function(*values)
                if result is not None:
                    result(results, value)
                return 0
            except BaseException as error:
                return new_error(self._on_fault(error))

        raw = _Callback(callback)
        self._keep.append(raw)
        _check_added(_add_func(_pointer(instance), name.encode(), len(name.encode()), raw, None, None), name)

    def add_blocking(
        self,
        instance: Any,
        name: str,
        params: Sequence[Reader],
        result: Writer | None,
        function: Callable[..., Blocking],
    ) -> None:
        """Define a function that suspends the guest's fiber until its `Blocking` is done."""
        offsets = [(reader, index * VAL_BYTES) for index, reader in enumerate(params)]

        def callback(
            _env: int,
            _ctx: int,
            _ty: int,
            args: int,
            _nargs: int,
            results: int,
            _nresults: int,
            error_slot: int,
            continuation: int,
        ) -> None:
            try:
                call = function(*[reader(args + offset) for reader, offset in offsets])
            except BaseException as error:
                call = Failing(error)
            call.write = result
            self._next += 1
            self._calls[self._next] = (call, results, error_slot)
            slots = (c_size_t * 3).from_address(continuation)  # wasmtime_async_continuation_t: callback, env, finalizer
            slots[0], slots[1], slots[2] = self._continue_at, self._next, self._finalize_at

        raw = _AsyncCallback(callback)
        self._keep.append(raw)
        _check_added(_add_func_async(_pointer(instance), name.encode(), len(name.encode()), raw, None, None), name)

    def _resume(self, key: int) -> bool:
        try:
            call, results, error_slot = self._calls[key]
            if not call.done():
                return False
            try:
                value = call.value()
                if call.write is not None:
                    call.write(results, value)
            except BaseException as error:
                _size_at(error_slot).value = new_error(self._on_fault(error))
            return True
        except BaseException as error:  # nothing may leave a callback; an unknown key would suspend the guest for ever
            self._on_fault(error)
            return False

    def _forget(self, key: int) -> None:
        self._calls.pop(key, None)


class Blocking:
    """A host call that may suspend the guest."""

    write: Writer | None = None

    def done(self) -> bool:
        raise TypeError("abstract")

    def value(self) -> Any:
        raise TypeError("abstract")


class Ready(Blocking):
    """A call that need not wait after all."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def done(self) -> bool:
        return True

    def value(self) -> Any:
        return self._value


class Failing(Blocking):
    """A blocking call that failed before it began."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def done(self) -> bool:
        return True

    def value(self) -> Any:
        raise self._error


def _pointer(managed: Any) -> Any:
    return ctypes.cast(managed.ptr(), c_void_p)


def _check_added(error: int | None, name: str) -> None:
    if error:
        raise RuntimeError(f"wasmtime refused the host function {name}: {take_error_message(error)}")


def take_error_message(error: int) -> str:
    """The message of a `wasmtime_error_t*`, which is deleted."""
    pointer = ctypes.cast(error, ctypes.POINTER(ffi.wasmtime_error_t))
    text = ffi.wasm_byte_vec_t()
    ffi.wasmtime_error_message(pointer, ctypes.byref(text))
    message = string_at(text.data, text.size).decode("utf-8", "replace")
    ffi.wasm_byte_vec_delete(ctypes.byref(text))
    ffi.wasmtime_error_delete(pointer)
    return message
