"""A user's kernels: correct ones, and one for each kind of defect.  They support any operator."""

import ctypes
import time

import torch

from ssdprof.kernels import UnsupportedError
from ssdprof.measure.accuracy import oracle_output


def good(inputs):
    return oracle_output(inputs)


def precise(inputs, precision):
    if not precision.exact:
        raise UnsupportedError("precise: exact intermediates only")
    return oracle_output(inputs)


def wrong_head(inputs):
    out, states = oracle_output(inputs)
    out[:, :, 1] *= 1.5
    return out, states


def nan(inputs):
    out, states = oracle_output(inputs)
    out[0, 5, 1, 2] = float("nan")
    return out, states


def raising(_inputs):
    raise ZeroDivisionError("seven by zero")


def refusing(_inputs):
    raise UnsupportedError("refusing: not on a Tuesday")


def hanging(_inputs):
    while True:
        time.sleep(0.01)


def crashing(_inputs):
    ctypes.string_at(0)  # a signal would wait for a thread that takes it


def crashing_for_large(inputs):
    return oracle_output(inputs) if inputs.x.max() < 100 else crashing(inputs)


def hanging_for_large(inputs):
    return oracle_output(inputs) if inputs.x.max() < 100 else hanging(inputs)


def leaving(_inputs):
    print("I have seen enough")
    raise SystemExit(5)


def changing(inputs):
    output = oracle_output(inputs)
    next(iter(inputs.tensors.values()))[0, 0, 0, 0] += 1
    return output


def beyond_its_output(inputs):
    out, states = oracle_output(inputs)
    torch.as_strided(out, (1,), (1,), out.storage_offset() + out.numel() + 7).fill_(1)
    return out, states


def beyond_its_input(inputs):
    first = next(iter(inputs.tensors.values()))
    torch.as_strided(first, (1,), (1,), first.storage_offset() - 1).fill_(1)
    return oracle_output(inputs)


def incomplete(inputs):
    out, states = oracle_output(inputs)
    partly = torch.empty_like(out)
    partly[:, 2:] = out[:, 2:]
    return partly, states


def misshapen(inputs):
    out, states = oracle_output(inputs)
    return out.transpose(1, 2), states


def too_wide(inputs):
    out, states = oracle_output(inputs)
    return out.double(), states


def half_states(inputs):
    out, states = oracle_output(inputs)
    return out, states.half()


def alone(inputs):
    return oracle_output(inputs)[0]


def not_a_tensor(inputs):
    return oracle_output(inputs)[0], None
