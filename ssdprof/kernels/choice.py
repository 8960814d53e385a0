"""The first of an operator's fused kernels that supports a call runs it: the choice, its plan, and
kept launches.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from ssdprof.kernels.device import INTERPRETED, refuse_device, refuse_gradient
from ssdprof.kernels.inputs import Inputs, Output, PreparedLaunch
from ssdprof.kernels.launch import kept
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.registry import Plan, when_overridden
from ssdprof.kernels.tensors import contiguous_copy, contiguous_view, is_scattered, overlaps

I = TypeVar("I", bound=Inputs)


@dataclass(frozen=True, kw_only=True)
class FusedCall:
    """A call of a fused implementation.

    batch_invariant: a sequence's result must not depend on the number of others.
    state_v_first: for GDN: V precedes K in the memory of final states.
    """

    inputs: Any  # the operator's own `Inputs`
    precision: Precision
    batch_invariant: bool = False
    state_v_first: bool = False


# of a call: launches, bytes of the workspace, and the reason for the plan
Work = tuple[int, int, str]


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A kernel.

    unsupported: why the kernel does not support a call, or should not run it; "" if it runs
    configure: its configuration for a call, a mapping, or a dataclass with a field `reason`
    prepare: makes the launch, without tensors, of a call with a configuration
    work: of a call with a configuration
    """

    name: str
    unsupported: Callable[[FusedCall], str] = lambda _call: ""
    configure: Callable[[FusedCall], Any]
    prepare: Callable[[FusedCall, Any], PreparedLaunch]
    work: Callable[[FusedCall, Any], Work]

    def plan(self, call: FusedCall) -> Plan:
        """The plan of a call by this variant."""
        config = self.configure(call)
        settings = dict(config) if isinstance(config, Mapping) else asdict(config)
        settings.pop("reason", None)
        launches, workspace_bytes, reason = self.work(call, config)
        return Plan(
            variant="interpreter" if INTERPRETED and self.name == "portable" else self.name,
            launches=launches,
            config=settings,
            workspace_bytes=workspace_bytes,
            reason=reason,
        )


class Fused:
    """An implementation that chooses among kernels, its variants, for each call.

    name: of the implementation.
    variants: in order of preference.  The last one supports every call.
    rows: tensors (b, l, heads, columns), which are copied if a better variant then supports the
    call.
    refuse: raises UnsupportedError for inputs that no variant supports.
    """

    def __init__(
        self,
        name: str,
        variants: Sequence[Variant],
        rows: tuple[str, ...] = (),
        refuse: Callable[[Any], None] = lambda _inputs: None,
    ) -> None:
        self.name = name
        self.variants = variants
        self._rows = rows
        self._refuse = refuse
        # without one, a call chooses its kernel and configuration
        self.launches: dict[Hashable, PreparedLaunch] = {}
        when_overridden(self.launches.clear)

    def choose(self, call: FusedCall) -> Variant:
        """The variant that runs, by the GPU and by shapes, strides, alignment and dtypes."""
        return next(variant for variant in self.variants if not variant.unsupported(call))

    def variant_for(self, call: FusedCall) -> tuple[Variant, FusedCall, tuple[str, ...]]:
        """The kernel, the call as it gets it, and the names of tensors to copy first.

        In that call, tensors that are to be copied have the shapes and strides of copies, and no
        meaning.
        """
        self._refuse(call.inputs)
        refuse_device(self.name, getattr(call.inputs, call.inputs.FIRST))
        variant = self.choose(call)
        if variant is not self.variants[-1]:
            return variant, call, ()
        names = tuple(name for name in self._rows if is_scattered(getattr(call.inputs, name)))
        if names and not any(overlaps(getattr(call.inputs, name)) for name in names):
            copied = replace(call, inputs=_replaced(call.inputs, names, contiguous_view))
            better = self.choose(copied)
            if better is not variant:
                return better, copied, names
        return variant, call, ()

    def run(
        self,
        inputs: Inputs,
        precision: Precision = Precision(),  # noqa: B008
        *,
        batch_invariant: bool = False,
        state_v_first: bool = False,
    ) -> Output:
        """Output in the inputs' dtype, final states in fp32.  UnsupportedError for inputs that no
        kernel supports.

        A launch is prepared once per signature of the inputs, because this is most of a call's time
        on the host.
        """
        refuse_gradient(self.name, vars(inputs).values())
        signature = (
            inputs.signature,
            precision.intermediates,
            precision.state_dtype,
            batch_invariant,
            state_v_first,
        )
        arguments = (inputs, precision, batch_invariant, state_v_first)
        return kept(self.launches, signature, self.prepare, *arguments)(inputs)

    def prepare(
        self,
        inputs: Inputs,
        precision: Precision,
        batch_invariant: bool = False,
        state_v_first: bool = False,
    ) -> PreparedLaunch:
        """The launch of a call, which is not kept here."""
        inputs.check()
        call = FusedCall(
            inputs=inputs,
            precision=precision,
            batch_invariant=batch_invariant,
            state_v_first=state_v_first,
        )
        variant, call, names = self.variant_for(call)
        launch = variant.prepare(call, variant.configure(call))
        if not names:
            return launch
        return lambda inputs: launch(_replaced(inputs, names, contiguous_copy))

    def plan(
        self,
        inputs: Inputs,
        precision: Precision = Precision(),  # noqa: B008
        *,
        batch_invariant: bool = False,
    ) -> Plan:
        """The kernel that would run, with its configuration and reason.  Allocates and launches
        nothing.
        """
        call = FusedCall(inputs=inputs, precision=precision, batch_invariant=batch_invariant)
        variant, call, names = self.variant_for(call)
        plan = variant.plan(call)
        copies = sum(
            getattr(inputs, name).numel() * getattr(inputs, name).itemsize for name in names
        )
        return replace(
            plan,
            launches=plan.launches + len(names),
            workspace_bytes=plan.workspace_bytes + copies,
            reason=f"contiguous copies of {', '.join(names)}, then {plan.reason}"
            if names
            else plan.reason,
        )


def _replaced(inputs: I, names: Sequence[str], by: Callable[[Tensor], Tensor]) -> I:
    return inputs.unchecked(**vars(inputs) | {name: by(getattr(inputs, name)) for name in names})


# types in the schema of a torch operator, by the annotation of a field of the inputs
_SCHEMA_TYPES = {
    "Tensor": "Tensor",
    "Tensor | None": "Tensor?",
    "int": "int",
    "bool": "bool",
    "float | None": "float?",
    "tuple[float, float]": "float[]",
}
_SCHEMA_OPTIONS = "str intermediates, ScalarType state_dtype, bool batch_invariant, bool v_first"


def tensor_function(fused: Fused, kind: type[Inputs]) -> Callable[..., Output]:
    """Fused kernels as a function of the tensors and other fields of `kind`, by name.

    Registers it as a torch operator, for example `ssdprof::ssd_fused`, which is what torch.compile
    sees.  Its arguments are all fields, in their order, then what else a call has.
    """
    name = f"{kind.operator}_{fused.name}"
    defaults = {
        field.name: None if field.default is MISSING else field.default for field in fields(kind)
    }
    arguments = [f"{_SCHEMA_TYPES[str(field.type)]} {field.name}" for field in fields(kind)]

    def inputs_of(values: Sequence[Any]) -> Inputs:
        return kind.unchecked(**dict(zip(defaults, values, strict=False)))

    @torch.library.custom_op(
        f"ssdprof::{name}",
        mutates_args=(),
        schema=f"({', '.join(arguments)}, {_SCHEMA_OPTIONS}) -> (Tensor, Tensor)",
    )
    def operator(*values: Any) -> tuple[Tensor, Tensor]:
        *_, intermediates, state_dtype, batch_invariant, state_v_first = values
        with torch.no_grad():
            return fused.run(
                inputs_of(values),
                Precision(intermediates=intermediates, state_dtype=state_dtype),
                batch_invariant=batch_invariant,
                state_v_first=state_v_first,
            )

    @operator.register_fake
    def shapes(*values: Any) -> tuple[Tensor, Tensor]:
        """Results with the shapes, strides and dtypes of those of `operator`."""
        inputs = inputs_of(values)
        state_v_first = values[-1]
        *rest, rows, columns = inputs.final_shape
        memory = (*rest, columns, rows) if state_v_first else inputs.final_shape
        final_states = inputs.values.new_empty(memory, dtype=torch.float32)
        out = inputs.values.new_empty(inputs.values.shape)
        return out, (final_states.mT if state_v_first else final_states)

    def call(
        arguments: dict[str, Any],
        precision: Precision,
        *,
        batch_invariant: bool = False,
        state_v_first: bool = False,
    ) -> Output:
        """Call the variant for these arguments.  state_v_first: V precedes K in initial and final
        states.
        """
        initial = arguments[kind.LINEAR[1]]
        if state_v_first and initial is not None and initial.ndim == 4:
            arguments = arguments | {kind.LINEAR[1]: initial.mT}
        if torch.compiler.is_compiling():
            refuse_gradient(fused.name, arguments.values())
            out, final_states = getattr(torch.ops.ssdprof, name)(
                *(defaults | arguments).values(),
                precision.intermediates,
                precision.state_dtype,
                batch_invariant,
                state_v_first,
            )
        else:
            out, final_states = fused.run(
                kind.unchecked(**arguments),
                precision,
                batch_invariant=batch_invariant,
                state_v_first=state_v_first,
            )
        return Output(out, final_states.mT if state_v_first else final_states)

    return call
