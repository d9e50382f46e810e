"""Are operations counted as one would by hand, and waits for the device named by the script's own line?"""

import inspect

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from flatout.frameworks.pytorch.observe import flops  # noqa: E402
from flatout.frameworks.pytorch.observe.census import OperationCounter  # noqa: E402
from flatout.frameworks.pytorch.seams import script_code  # noqa: E402


def count(body):
    with OperationCounter() as counter:
        body()
    return counter.census()


def forward_and_backward(model, *inputs, count_inputs=False):
    inputs = [x.requires_grad_(count_inputs) if x.is_floating_point() else x for x in inputs]
    for parameter in model.parameters():
        parameter.grad = None
    forward = count(lambda: model(*inputs)).flops

    def both():
        out = model(*inputs)
        (out[0] if isinstance(out, tuple) else out).sum().backward()

    return forward, count(both).flops - forward


def test_a_linear_layer_is_two_operations_for_each_multiply_and_add():
    assert forward_and_backward(nn.Linear(10, 7), torch.randn(5, 10)) == (2 * 5 * 10 * 7, 2 * 5 * 10 * 7)
    assert forward_and_backward(nn.Linear(10, 7), torch.randn(5, 10), count_inputs=True)[1] == 2 * 2 * 5 * 10 * 7


def test_convolutions_count_what_each_output_pixel_sums():
    x = torch.randn(2, 6, 9, 9)
    plain = 2 * 2 * (7 * 7) * 8 * 6 * 9
    assert forward_and_backward(nn.Conv2d(6, 8, 3, bias=False), x, count_inputs=True) == (plain, 2 * plain)


def test_operations_of_convolutions_are_told_from_those_of_products_which_may_have_another_precision():
    model, x = nn.Sequential(nn.Conv2d(6, 8, 3), nn.Flatten(), nn.Linear(392, 5)), torch.randn(2, 6, 9, 9)
    found = count(lambda: model(x).sum().backward())
    assert found.flops - found.convolution_flops == 3 * (2 * 2 * 392 * 5), "forward, its weights and its inputs"
    assert count(lambda: model[2](torch.randn(3, 392))).convolution_flops == 0


@pytest.mark.parametrize("groups", [2, 6])
def test_a_grouped_convolution_sums_over_its_own_channels_alone(groups):
    x = torch.randn(2, 6, 9, 9)
    wanted = 2 * 2 * (7 * 7) * 12 * (6 // groups) * 9
    assert count(lambda: nn.Conv2d(6, 12, 3, groups=groups)(x)).flops == wanted


def test_a_transposed_convolution_spreads_each_input_pixel():
    x = torch.randn(2, 6, 5, 5)
    assert count(lambda: nn.ConvTranspose2d(6, 8, 3)(x)).flops == 2 * 2 * (5 * 5) * 6 * 8 * 9


@pytest.mark.parametrize("fused", [True, False])
def test_attention_is_two_products_of_queries_keys_and_values(fused):
    q = torch.randn(2, 3, 16, 8, requires_grad=True)
    wanted = 2 * (2 * 2 * 3 * 16 * 16 * 8)
    if fused:
        found = count(lambda: F.scaled_dot_product_attention(q, q, q))
        assert found.flops == wanted
        assert any("flash_attention_for_cpu" in op.name and op.counted for op in found.operations)
        both = count(lambda: F.scaled_dot_product_attention(q, q, q).sum().backward()).flops
        assert both == 3 * wanted  # that the backward computes the scores again is no work of the model's
    else:
        assert count(lambda: (q @ q.transpose(2, 3)).softmax(-1) @ q).flops == wanted


def test_a_transformer_layer_is_the_sum_of_its_products():
    batch, time, width, heads, inner = 2, 12, 16, 2, 32
    layer = nn.TransformerEncoderLayer(width, heads, inner, batch_first=True, dropout=0.0)
    projections = 4 * 2 * batch * time * width * width
    attention = 2 * 2 * batch * time * time * width
    feed_forward = 2 * 2 * batch * time * width * inner
    found = count(lambda: layer(torch.randn(batch, time, width)))
    assert found.flops == projections + attention + feed_forward


@pytest.mark.parametrize(("kind", "gates"), [(nn.LSTM, 4), (nn.GRU, 3)])
def test_recurrent_layers_are_products_of_each_step(kind, gates):
    batch, time, width, hidden = 3, 5, 6, 7
    layer = kind(width, hidden, batch_first=True)
    wanted = 2 * batch * time * gates * hidden * (width + hidden)
    forward, backward = forward_and_backward(layer, torch.randn(batch, time, width), count_inputs=True)
    assert forward == wanted
    assert backward == pytest.approx(2 * wanted, rel=0.2)  # the first state is zero


def test_embeddings_and_elementwise_operations_move_bytes_and_compute_nothing_that_counts():
    embedding = nn.Embedding(100, 16)
    found = count(lambda: embedding(torch.arange(10)).relu())
    assert found.flops == 0 and found.moved_bytes > 2 * 10 * 16 * 4
    assert all(not op.counted for op in found.operations)


def test_operations_without_a_formula_are_named_where_they_take_time():
    x = torch.randn(400, 400)
    found = count(lambda: torch.linalg.svd(x))
    assert "_linalg_svd" in found.uncounted or "linalg_svd" in found.uncounted


def test_on_a_device_what_is_heavy_is_told_by_what_it_computes_and_moves_not_by_its_launch():
    def step():
        for size in range(2, 60):
            torch.empty(size, device="meta").add(1)  # each launch takes as long as that of what follows
        torch.empty(4096, 4096, device="meta") @ torch.empty(4096, 4096, device="meta")
        torch.empty(4096, 40960, device="meta").tanh()

    found = count(step)
    assert [op.name for op in found.operations[:2]] == ["mm", "tanh"] and len(found.operations) == 40
    assert found.uncounted == ("tanh",), "launches of small ones do not add up to anything"


def test_equal_operations_are_one_row_with_their_number():
    x = torch.randn(4, 4)

    def body():
        for _ in range(5):
            x @ x
        torch.randn(8, 4) @ x

    rows = {op.shape: op for op in count(body).operations if op.name == "mm"}
    assert rows["4x4 4x4"].num_calls == 5 and rows["4x4 4x4"].flops == 5 * 2 * 4**3
    assert rows["8x4 4x4"].num_calls == 1 and rows["8x4 4x4"].dtype == "float32"


def test_values_read_back_are_named_by_the_scripts_own_line():
    loss, line = torch.ones(()), []

    def body():
        for _ in range(3):
            loss.item()
            line.append(inspect.currentframe().f_lineno)
        float(loss)
        bool(loss > 0)

    found = count(body)
    assert found.num_syncs == 5
    assert found.sync_places[0] == f"{__file__}:{line[0] - 1}, 3 times a step"
    assert all(__file__ in place for place in found.sync_places)


def test_the_optimizers_own_step_counters_are_no_waits():
    model = nn.Linear(3, 3)
    for kind in (torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop):
        optimizer = kind(model.parameters())
        model(torch.randn(2, 3)).sum().backward()
        assert count(optimizer.step).num_syncs == 0


def test_a_line_in_an_installed_package_gives_way_to_the_scripts_line_that_called_it(monkeypatch):
    here = __file__
    code = compile("def read(x):\n    return x.item()\n", "/somewhere/site-packages/metrics/mean.py", "exec")
    package = {}
    exec(code, package)
    monkeypatch.setattr(script_code, "INSTALLED", ("/somewhere/site-packages/",))
    (place,) = count(lambda: package["read"](torch.ones(()))).sync_places
    assert place.startswith(here)


def test_a_formula_that_does_not_fit_ends_nothing(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("other arguments")

    monkeypatch.setitem(flops.flop_registry, torch.ops.aten.mm, refuse)
    found = count(lambda: torch.randn(2, 2) @ torch.randn(2, 2))
    assert found.flops == 0 and not next(op for op in found.operations if op.name == "mm").counted


def test_nothing_is_counted_after_the_step_has_ended():
    counter = OperationCounter()
    with counter:
        torch.randn(2, 2) @ torch.randn(2, 2)
        counter.pause()
        torch.randn(2, 2) @ torch.randn(2, 2)
    assert counter.census().flops == 2 * 2**3


def test_counting_changes_no_number(workload, different, watch):
    plain = workload("transformer").train(10).state()
    watched, script = watch(), workload("transformer")
    watched.at(4, watched.pytorch.begin_census)
    watched.at(5, lambda: watched.answers.append(watched.pytorch.end_census()))
    script.train(10)
    assert different(plain, script.state()) == []
    (census,) = watched.answers
    assert census.flops > 0 and not any("attention" in name for name in census.uncounted)
