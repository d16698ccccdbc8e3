"""A surrounding torch.compile calls our arithmetic, it does not trace it."""

import pytest

from attention_cases import RESULTS, everything, operands
from bits import assert_equal_bits
from te_overrides.kernels.attention import context_parallel, reference
from te_overrides.kernels.attention.context_parallel import context_parallel_attention
from te_overrides.kernels.eager import eager_only


class Recorder:
    """A backend that runs what it is given and remembers the operations."""

    def __init__(self):
        self.operations = []

    def __call__(self, graph_module, example_inputs):
        self.operations += [
            str(node.target) for node in graph_module.graph.nodes if node.op.startswith("call")
        ]
        return graph_module.forward


@pytest.fixture
def compiled_step():
    """(recorder, step): forward and backward of a model around attention, both under the compiler."""
    import torch._dynamo

    torch._dynamo.reset()
    recorder = Recorder()

    def model(query, key, value):
        out, lse = context_parallel_attention(query * 2.0, key, value)
        return out * 3.0, lse

    def step(query, key, value, grad):
        out, lse = torch.compile(model, backend=recorder)(query, key, value)
        out.backward(grad)
        return out.detach(), lse

    with torch._dynamo.config.patch(compiled_autograd=True):
        yield recorder, torch.compile(step, backend=recorder)
    torch._dynamo.reset()


def test_a_compiler_around_attention_and_its_backward_does_not_see_its_arithmetic(compiled_step):
    recorder, step = compiled_step
    *tensors, grad = operands(70, 1, 2, 1, 8)
    leaves = [x.clone().requires_grad_() for x in tensors]
    out, lse = step(*leaves, grad)
    q, k, v = tensors
    want = everything(q * 2.0, k, v, grad * 3.0)
    want["out"], want["dQ"] = want["out"] * 3.0, want["dQ"] * 2.0
    for name, got in zip(RESULTS, (out, lse, *(x.grad for x in leaves)), strict=True):
        assert_equal_bits(got, want[name], name)
    # The caller's own multiplications, and nothing of a chain that takes hundreds of operations.
    assert any("mul" in operation for operation in recorder.operations)
    assert len(recorder.operations) < 60, recorder.operations


def test_without_the_guard_the_compiler_sees_the_backward(compiled_step, monkeypatch):
    recorder, step = compiled_step
    monkeypatch.setattr(context_parallel, "attention_dq", context_parallel.attention_dq.__wrapped__)
    monkeypatch.setattr(reference, "attention_dq", reference.attention_dq.__wrapped__)
    *tensors, grad = operands(16, 1, 1, 1, 4)
    step(*(x.clone().requires_grad_() for x in tensors), grad)
    assert len(recorder.operations) > 60


def test_the_wrapper_keeps_name_arguments_and_results():
    @eager_only
    def add(a, b=2):
        """Adds."""
        return a + b

    assert (add.__name__, add.__doc__, add(1), add(1, b=5)) == ("add", "Adds.", 3, 6)
