"""Fused implementations: each call runs on the first of an operator's fused kernels that supports
it.  This file has the choice, its plan, the launches that are kept, and the torch operator.
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

    inputs: the operator's inputs, such as `GDNInputs`.
    batch_invariant: whether a sequence's result must not depend on the number of other sequences.
    state_v_first: for GDN and KDA, whether V precedes K in the memory of final states.
    """

    inputs: Any
    precision: Precision
    batch_invariant: bool = False
    state_v_first: bool = False


# the number of launches, the bytes of the workspace, and the reason for the plan
Work = tuple[int, int, str]


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One of the kernels of a fused implementation.

    unsupported: (call) -> why the kernel does not support the call, or should not run it; "" if it
        runs it.
    configure: (call) -> the configuration: a mapping, or a dataclass with a field `reason`.
    prepare: (call, configuration) -> the launch, without the call's tensors.
    work: (call, configuration) -> the launches, the workspace and the reason of the plan.
    """

    name: str
    unsupported: Callable[[FusedCall], str] = lambda _call: ""
    configure: Callable[[FusedCall], Any]
    prepare: Callable[[FusedCall, Any], PreparedLaunch]
    work: Callable[[FusedCall, Any], Work]

    def plan(self, call: FusedCall) -> Plan:
        """The plan for a call that this variant runs, with the configuration without its reason."""
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

    name: name of the implementation.
    variants: the variants in order of preference.  The last one supports every call that is not
        refused.
    rows: names of tensors (b, l, heads, columns) that are copied to contiguous memory if a better
        variant supports the call then.
    refuse: raises UnsupportedError for inputs that no variant supports on any device.
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
        # signature of a call -> its launch; a call without one chooses variant and configuration
        self.launches: dict[Hashable, PreparedLaunch] = {}
        when_overridden(self.launches.clear)

    def choose(self, call: FusedCall) -> Variant:
        """The first variant that supports the call.  It depends on the GPU, the precision and
        options of the call, which optional tensors it has, and the shapes, strides, alignment and
        dtypes of all tensors.
        """
        return next(variant for variant in self.variants if not variant.unsupported(call))

    def variant_for(self, call: FusedCall) -> tuple[Variant, FusedCall, tuple[str, ...]]:
        """The variant that runs a call, the call as the variant gets it, and the names of tensors
        that must be copied before.  Raises UnsupportedError if the inputs or their device have no
        variant.

        In the returned call, tensors that must be copied have the shapes and strides of the copies,
        but arbitrary values.
        """
        self._refuse(call.inputs)
        refuse_device(self.name, getattr(call.inputs, call.inputs.FIRST))
        variant = self.choose(call)
        # copies are worth their time only if otherwise the last variant would run
        if variant is not self.variants[-1]:
            return variant, call, ()
        scattered = tuple(name for name in self._rows if is_scattered(getattr(call.inputs, name)))
        if scattered and not any(overlaps(getattr(call.inputs, name)) for name in scattered):
            copied = replace(call, inputs=_replaced(call.inputs, scattered, contiguous_view))
            better = self.choose(copied)
            if better is not variant:
                return better, copied, scattered
        return variant, call, ()

    def run(
        self,
        inputs: Inputs,
        precision: Precision = Precision(),  # noqa: B008
        *,
        batch_invariant: bool = False,
        state_v_first: bool = False,
    ) -> Output:
        """Run a call: out in the dtype of the values, final states in fp32.  Raises ValueError for
        inputs that do not fit together, and UnsupportedError for inputs that require a gradient or
        that no variant supports.

        A launch is prepared once for each signature of the inputs, precision and options, because
        preparing it takes most of a call's time on the host.
        """
        refuse_gradient(self.name, vars(inputs).values())
        signature = (
            inputs.signature,
            precision.intermediates,
            precision.state_dtype,
            batch_invariant,
            state_v_first,
        )
        launch = kept(
            self.launches,
            signature,
            self.prepare,
            inputs,
            precision,
            batch_invariant,
            state_v_first,
        )
        return launch(inputs)

    def prepare(
        self,
        inputs: Inputs,
        precision: Precision,
        batch_invariant: bool = False,
        state_v_first: bool = False,
    ) -> PreparedLaunch:
        """Check the inputs, choose the variant and its configuration, and prepare the launch, which
        is not kept here.  Raises ValueError for inputs that do not fit together, and what
        `variant_for` raises.
        """
        inputs.check()
        call = FusedCall(
            inputs=inputs,
            precision=precision,
            batch_invariant=batch_invariant,
            state_v_first=state_v_first,
        )
        variant, call, names = self.variant_for(call)
        launch = variant.prepare(call, variant.configure(call))

        def launch_on_copies(call_inputs: Inputs) -> Output:
            return launch(_replaced(call_inputs, names, contiguous_copy))

        return launch_on_copies if names else launch

    def plan(
        self,
        inputs: Inputs,
        precision: Precision = Precision(),  # noqa: B008
        *,
        batch_invariant: bool = False,
    ) -> Plan:
        """The plan for a call: the variant that would run, with its configuration and reason.
        Allocates and launches nothing.  Raises what `variant_for` raises; whether the inputs fit
        together is not checked.
        """
        call = FusedCall(inputs=inputs, precision=precision, batch_invariant=batch_invariant)
        variant, call, names = self.variant_for(call)
        plan = variant.plan(call)
        if not names:
            return plan
        copies = [getattr(inputs, name) for name in names]
        return replace(
            plan,
            launches=plan.launches + len(names),
            workspace_bytes=plan.workspace_bytes
            + sum(copy.numel() * copy.itemsize for copy in copies),
            reason=f"contiguous copies of {', '.join(names)}, then {plan.reason}",
        )


def _replaced(inputs: I, names: Sequence[str], convert: Callable[[Tensor], Tensor]) -> I:
    """The inputs with these tensors converted."""
    converted = {name: convert(getattr(inputs, name)) for name in names}
    return inputs.unchecked(**vars(inputs) | converted)


# annotation of a field of the inputs -> its type in the schema of a torch operator
_SCHEMA_TYPES = {
    "Tensor": "Tensor",
    "Tensor | None": "Tensor?",
    "int": "int",
    "bool": "bool",
    "float | None": "float?",
    "tuple[float, float]": "float[]",
}
# the arguments of the torch operator after the fields of the inputs
_SCHEMA_OPTIONS = (
    "str intermediates, ScalarType state_dtype, bool batch_invariant, bool state_v_first"
)


def tensor_function(fused: Fused, kind: type[Inputs]) -> Callable[..., Output]:
    """The fused implementation as a function of the fields of its inputs: `call` below.

    Also registers a torch operator, for example `ssdprof::ssd_fused`, which torch.compile sees in
    place of the function.  Its arguments are all fields of the inputs in order, then
    `_SCHEMA_OPTIONS`.

    kind: the type of the inputs.
    """
    name = f"{kind.operator}_{fused.name}"
    # field -> its default, in the order of the schema; None for fields without one
    defaults = {
        field.name: None if field.default is MISSING else field.default for field in fields(kind)
    }
    arguments = [f"{_SCHEMA_TYPES[str(field.type)]} {field.name}" for field in fields(kind)]

    def inputs_of(values: Sequence[Any]) -> Inputs:
        """The inputs among the arguments of the torch operator, which has options after them."""
        return kind.unchecked(**dict(zip(defaults, values, strict=False)))

    @torch.library.custom_op(
        f"ssdprof::{name}",
        mutates_args=(),
        schema=f"({', '.join(arguments)}, {_SCHEMA_OPTIONS}) -> (Tensor, Tensor)",
    )
    def operator(*values: Any) -> tuple[Tensor, Tensor]:
        """The torch operator.  Final states have the shape `final_shape` also if state_v_first."""
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
        """Empty results with the shapes, strides and dtypes of those of `operator`."""
        inputs = inputs_of(values)
        state_v_first = values[-1]
        sequences, heads, rows, columns = inputs.final_shape
        shape = (sequences, heads, rows, columns)
        if state_v_first:
            shape = (sequences, heads, columns, rows)
        final_states = inputs.values.new_empty(shape, dtype=torch.float32)
        out = inputs.values.new_empty(inputs.values.shape)
        return out, (final_states.mT if state_v_first else final_states)

    def call(
        arguments: dict[str, Any],
        precision: Precision,
        *,
        batch_invariant: bool = False,
        state_v_first: bool = False,
    ) -> Output:
        """Run a call, through the torch operator inside of torch.compile.  Raises the errors of
        `Fused.run`.

        arguments: fields of the inputs by name, among them the initial states, which may be None.
        state_v_first: whether V precedes K in the shapes of initial and final states, and in the
            memory of final states.
        """
        initial = arguments[kind.STATES]
        if state_v_first and initial is not None and initial.ndim == 4:
            arguments = arguments | {kind.STATES: initial.mT}
        if torch.compiler.is_compiling():
            refuse_gradient(fused.name, arguments.values())
            values = defaults | arguments  # in the order of the schema, that of `defaults`
            out, final_states = getattr(torch.ops.ssdprof, name)(
                *values.values(),
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
