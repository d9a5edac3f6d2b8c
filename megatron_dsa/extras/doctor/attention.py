"""Sparse attention: every forward with every backward, and the indexer's teacher."""

import torch

from megatron_dsa.extras.doctor.results import Part
from megatron_dsa.extras.doctor.session import Session, named
from megatron_dsa.ops import OPERATIONS
from megatron_dsa.ops.dispatch import describe_call
from megatron_dsa.ops.dispatch.support import OpCall
from megatron_dsa.testing.cases import (
    Shape,
    difficult_lists,
    full_lists,
    layout_of,
    layout_of_tokens,
    sampled_tokens,
)
from megatron_dsa.testing.sparse_attention import (
    AttentionReference,
    attention_case,
    expected_attention,
)

FORWARD, BACKWARD, TEACHER = (
    "sparse_attention_forward",
    "sparse_attention_backward",
    "sparse_attention_probabilities",
)

#: Query rows of the full size that are compared with float64.
FULL_SIZE_ROWS = 8


def attention_call(shape: Shape, device: torch.device) -> OpCall:
    """What dispatch is told of a call; packing is no concern of the index lists."""
    return describe_call(
        device,
        dtype=shape.dtype,
        heads=shape.heads,
        qk_dim=shape.qk_dim,
        v_dim=shape.v_dim,
        topk=shape.topk,
        sink=shape.sink,
    )


class _FullSize:
    """One case with as many query rows as a training step has; some of them are compared."""

    def __init__(self, session: Session, call: OpCall, shape: Shape):
        self.session, self.op_call = session, call
        self.case = attention_case(shape, full_lists(shape, session.device))
        self.rows = sampled_tokens(len(self.case.q), FULL_SIZE_ROWS, session.device)
        self.expected = expected_attention(self.case.take(self.rows))
        #: out and lse of a forward that is right, for the backwards and the teachers.
        self.outputs: tuple[torch.Tensor, torch.Tensor] | None = None

    def forward(self, part: Part, pair) -> None:
        """Note times and errors of a forward in ``part``."""

        def call():
            return OPERATIONS[FORWARD].run(self.op_call, named(pair), self.case.inputs())[:2]

        def judge(out, lse):
            part.compare("out at full size", out[self.rows], self.expected.out)
            part.compare("lse at full size", lse[self.rows], self.expected.lse)

        outputs = self.session.full_size(part, "forward", call, judge)
        if outputs is not None and not part.wrong():
            self.outputs = outputs

    def backward(self, pair) -> Part:
        """Return times and errors of a backward."""
        part = self.session.part(pair)
        outputs = self.outputs
        if outputs is None:
            part.remarks.append("not run at full size: no forward is right there")
            return part

        def call():
            arguments = (self.case.inputs(), *outputs, self.case.dout)
            return OPERATIONS[BACKWARD].run(self.op_call, named(pair), *arguments)[:3]

        def judge(dq, dkv, _dsink):
            part.compare("dq at full size", dq[self.rows], self.expected.dq)
            part.require(torch.isfinite(dkv).all(), "dkv at full size not finite")

        self.session.full_size(part, "backward", call, judge)
        return part

    def teacher(self, part: Part, pair) -> None:
        """Note times and errors of a teacher in ``part``."""
        outputs = self.outputs
        if outputs is None:
            return

        def call():
            lse = outputs[1]
            return (OPERATIONS[TEACHER].run(self.op_call, named(pair), self.case.inputs(), lse),)

        def judge(p_sum):
            part.compare("p_sum at full size", p_sum[self.rows], self.expected.p_sum)

        self.session.full_size(part, "teacher", call, judge)


def check_attention(session: Session, shape: Shape) -> None:
    """File a verdict on every pair and on every teacher."""
    device, label = session.device, shape.attention_label()
    call = attention_call(shape, device)
    picked = {op: session.choice(op, call, label) for op in (FORWARD, BACKWARD, TEACHER)}
    usable = {op: session.available(op, call, label) for op in (FORWARD, BACKWARD, TEACHER)}
    sampled = sampled_tokens(shape.seq, shape.rows, device)
    layout = layout_of_tokens(layout_of(shape, device), sampled)
    case = attention_case(shape, difficult_lists(shape, layout))
    reference = AttentionReference(case)
    forwards = [_forward(session, call, case, reference, pair) for pair in usable[FORWARD]]
    teachers = [_teacher(session, call, case, reference, pair) for pair in usable[TEACHER]]
    backwards = {
        (forward.name, pair[1].name): _backward(session, call, case, reference, pair, outputs)
        for forward, outputs in forwards
        if outputs is not None
        for pair in usable[BACKWARD]
    }
    if session.timed and session.lost is None:
        full = _FullSize(session, call, shape)
        for pair, (part, _) in zip(usable[FORWARD], forwards, strict=True):
            full.forward(part, pair)
        for pair, part in zip(usable[TEACHER], teachers, strict=True):
            full.teacher(part, pair)
        for pair in usable[BACKWARD]:
            found = full.backward(pair)
            for (_, name), part in backwards.items():
                if name == pair[1].name:
                    part.add(found)
    for forward, outputs in forwards:
        if outputs is None:
            chosen = forward.name == picked[FORWARD]
            session.file("sparse attention", label, shape, (forward,), chosen)
            continue
        for pair in usable[BACKWARD]:
            backward = backwards[forward.name, pair[1].name]
            chosen = (forward.name, backward.name) == (picked[FORWARD], picked[BACKWARD])
            session.file("sparse attention", label, shape, (forward, backward), chosen)
    for part in teachers:
        session.file("teacher", label, shape, (part,), part.name == picked[TEACHER])


def _forward(session, op_call, case, reference, pair):
    """Return the verdict and, unless it crashed, ``(out, lse)``."""
    part = session.part(pair)

    def call(want_p_sum=False):
        return OPERATIONS[FORWARD].run(op_call, named(pair), case.inputs(want_p_sum))

    outputs = session.examine(
        part, lambda: call()[:2], lambda *result: reference.forward(part, *result)
    )
    if outputs is not None:
        session.once(part, lambda: call(True), lambda *result: reference.forward(part, *result))
    return part, None if part.crashed or part.skipped else outputs


def _backward(session, op_call, case, reference, pair, outputs) -> Part:
    part = session.part(pair)

    def call(want_p_sum=False):
        arguments = (case.inputs(want_p_sum), *outputs, case.dout)
        return OPERATIONS[BACKWARD].run(op_call, named(pair), *arguments)

    def compare(*result):
        reference.backward(part, *result)
        dtype = result[1].dtype
        part.require(dtype == torch.float32, f"dkv is {dtype}, not float32")

    done = session.examine(part, lambda: call()[:3], compare)
    if done is not None:
        # Asking for the probabilities may take another kernel: everything is compared again.
        session.once(part, lambda: call(True), compare)
    return part


def _teacher(session, op_call, case, reference, pair) -> Part:
    part = session.part(pair)

    def call():
        return (OPERATIONS[TEACHER].run(op_call, named(pair), case.inputs(), reference.lse()),)

    session.examine(part, call, lambda p_sum: reference.teacher(part, p_sum))
    return part
