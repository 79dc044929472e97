"""The ways of training do what they say, and a measurement notices when they do not."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from benchmarks.bench import batches, child, measure
from benchmarks.bench.cases import case_names, default_names, find_case
from benchmarks.bench.job import BenchError, Job
from benchmarks.bench.ways import _stacked_adamw, compiled, eager, fused, processes, stacked
from benchmarks.bench.ways._base import WEIGHT_DECAY, Prepared, Setup, learning_rates
from benchmarks.bench.ways.table import WAYS, default_ways, find_way
from benchmarks.workloads import FULL_SIZE, TokenBatch
from torch import Tensor, nn

CPU = torch.device("cpu")
WIDTH = 2


def job(way: str = "eager", workload: str = "small:mlp", folder: str = "", **fleet: Any) -> Job:
    return Job(workload, 4, WIDTH, way, "cpu", num_blocks=2, block_seconds=0.01, folder=folder, fleet=fleet)


def losses(
    prepare: Callable[[Setup], Prepared], workload: str, order: Sequence[int] = (0, 1, 2, 3)
) -> Tensor:
    """The members' losses on batches in this order, from the same weights for every way."""
    setup, data = measure.make_setup(job(workload=workload), WIDTH, CPU)
    prepared = prepare(setup)
    assert prepared.num_members == WIDTH
    return torch.stack([prepared.step(data[index]).clone() for index in order])


class EagerGraph:
    """Stands in for a CUDA graph: every replay runs the function again, into the same result."""

    def __init__(self, function: Callable[[], Tensor], result: Tensor) -> None:
        self._function = function
        self._result = result

    def replay(self) -> None:
        self._result.copy_(self._function())


@pytest.fixture
def no_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the captured ways on a CPU: nothing is captured, and code is traced but not compiled."""
    compile_with = torch.compile

    def capture(function: Callable[[], Tensor], device: torch.device) -> tuple[EagerGraph, Tensor]:
        result = torch.zeros_like(function())
        return EagerGraph(function, result), result

    def trace(function: Callable[..., Any], **options: Any) -> Any:
        return compile_with(function, **{**options, "backend": "aot_eager"})

    monkeypatch.setattr(compiled, "capture", capture)
    monkeypatch.setattr(stacked, "capture", capture)
    monkeypatch.setattr(torch, "compile", trace)


@pytest.mark.parametrize("workload", ["small:mlp", "small:cnn"])
@pytest.mark.parametrize("prepare", [stacked.prepare_eager, fused.prepare], ids=["vmap", "trainmux"])
def test_ways_train_the_same_models(prepare: Callable[[Setup], Prepared], workload: str) -> None:
    expected = losses(eager.prepare, workload)
    torch.testing.assert_close(losses(prepare, workload), expected, rtol=2e-2, atol=2e-2)
    assert (expected[0] != expected[-1]).all()


@pytest.mark.usefixtures("no_graphs")
@pytest.mark.parametrize("prepare", [compiled.prepare, stacked.prepare_captured], ids=["alone", "vmap"])
def test_captured_ways_train_the_same_models(prepare: Callable[[Setup], Prepared]) -> None:
    # The stand-in for capturing trains once on the example, which is the first batch.
    expected = losses(eager.prepare, "small:mlp", order=(0, 0, 1, 2))[1:]
    found = losses(prepare, "small:mlp", order=(0, 1, 2))
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def test_vmap_gives_norms_fp32_where_autocast_fails_and_says_so() -> None:
    setup, _ = measure.make_setup(job(workload="small:cnn"), WIDTH, CPU)
    before = [dict(model.named_buffers()) for model in setup.models]
    stack = stacked._Stack(setup)
    assert stacked.NORMS_IN_FP32 in stack.notes[0]
    for name, value in stack.buffers.items():  # the trial left running statistics alone
        expected = torch.stack([buffers[name.removeprefix("model.")] for buffers in before])
        assert torch.equal(value, expected)


@pytest.mark.usefixtures("no_graphs")
def test_compiled_vmap_does_without_cudnns_attention_where_it_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    allowed: list[bool] = []
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", allowed.append)
    folder = str(tmp_path / "compiled")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", folder)
    capture = stacked.capture

    def capture_without_cudnn(function: Callable[[], Tensor], device: torch.device) -> Any:
        if not allowed:
            raise RuntimeError("the mask is too small\nand more")
        return capture(function, device)

    monkeypatch.setattr(stacked, "capture", capture_without_cudnn)
    setup, data = measure.make_setup(job(), WIDTH, CPU)
    prepared = stacked.prepare_captured(setup)
    assert allowed == [False]
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] != folder  # code that was compiled with it is not found
    assert prepared.notes == (f"{stacked.NO_CUDNN_ATTENTION} (torch: the mask is too small)",)
    first, second = (prepared.step(data[0]).clone() for _ in range(2))
    assert (second != first).all()


@pytest.mark.usefixtures("no_graphs")
def test_compiled_vmap_out_of_memory_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def capture(function: Callable[[], Tensor], device: torch.device) -> Any:
        raise torch.OutOfMemoryError("nothing left")

    monkeypatch.setattr(stacked, "capture", capture)
    setup, _ = measure.make_setup(job(), WIDTH, CPU)
    with pytest.raises(torch.OutOfMemoryError, match="nothing left"):
        stacked.prepare_captured(setup)


def has_bf16_lstm() -> bool:
    """Whether torch has one for this processor: for ARM without bf16 it has not."""
    try:
        with torch.autocast("cpu", torch.bfloat16):
            nn.LSTM(2, 2)(torch.zeros(1, 1, 2))
    except RuntimeError:
        return False
    return True


@pytest.mark.skipif(not has_bf16_lstm(), reason="torch has no LSTM in bf16 for this processor")
@pytest.mark.filterwarnings("ignore:There is a performance drop")  # vmap goes through LSTMs one by one
def test_vmap_swaps_the_weights_of_recurrent_layers() -> None:
    setup, data = measure.make_setup(job(workload="small:lstm"), WIDTH, CPU)
    found, _ = stacked._Stack(setup).losses_and_gradients(data[0])
    assert found[0] != found[1]


@pytest.mark.parametrize("update", [_stacked_adamw.update_foreach, _stacked_adamw.update_plain])
def test_stacked_adamw_is_torchs(update: Callable[..., None]) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 4), (4,), ()]
    members = [[torch.randn(shape, generator=generator) for shape in shapes] for _ in range(WIDTH)]
    rates = [1e-2, 3e-2]
    state = _stacked_adamw.make_state([torch.stack(parts) for parts in zip(*members, strict=True)], rates)
    alone = [[nn.Parameter(tensor) for tensor in tensors] for tensors in members]
    optimizers = [
        torch.optim.AdamW(parameters, lr=lr, weight_decay=WEIGHT_DECAY)
        for parameters, lr in zip(alone, rates, strict=True)
    ]
    for _ in range(5):
        gradients = [torch.randn((WIDTH, *shape), generator=generator) for shape in shapes]
        update(state, gradients)
        for index, optimizer in enumerate(optimizers):
            for parameter, gradient in zip(alone[index], gradients, strict=True):
                parameter.grad = gradient[index].clone()
            optimizer.step()
    for stack, *parts in zip(state.parameters, *alone, strict=True):
        torch.testing.assert_close(stack, torch.stack(parts).detach())


def test_members_have_different_learning_rates() -> None:
    rates = learning_rates(4)
    assert len(set(rates)) == 4
    assert min(rates) == 1e-4
    setup, _ = measure.make_setup(job(), 1, CPU, first=1)
    assert setup.learning_rates == learning_rates(WIDTH)[1:]


class Pair(NamedTuple):
    left: Any
    right: Any


def test_batches_of_every_kind_are_mapped() -> None:
    one = torch.ones(2)
    tree = {"a": [one, (one, "text")], "b": Pair(one, None), "c": TokenBatch(one, one)}
    doubled = batches.map_tensors(lambda tensor: 2 * tensor, tree)
    assert doubled["a"][1][1] == "text"
    assert isinstance(doubled["b"], Pair)
    assert isinstance(doubled["c"], TokenBatch)
    assert all(torch.equal(tensor, 2 * one) for tensor in batches.tensors_of(doubled))
    assert len(list(batches.tensors_of(tree))) == 5


def test_a_static_batch_takes_what_is_loaded() -> None:
    example = (torch.zeros(2, 3), torch.zeros(2, dtype=torch.long))
    static = batches.StaticBatch(example, CPU)
    held = static.tree[0]
    static.load((torch.ones(2, 3), torch.arange(2)))
    assert static.tree[0] is held
    assert torch.equal(held, torch.ones(2, 3))
    assert torch.equal(example[0], torch.zeros(2, 3))


def test_only_images_change_their_layout() -> None:
    images, labels = batches.channels_last((torch.rand(2, 3, 4, 4), torch.arange(2)))
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(labels, torch.arange(2))


@pytest.mark.parametrize(
    ("first", "last", "reason"),
    [([1.0, 2.0], [0.5, float("nan")], "not finite"), ([1.0, 2.0], [1.0, 1.5], "did not train")],
)
def test_a_way_that_does_not_train_is_refused(first: list[float], last: list[float], reason: str) -> None:
    with pytest.raises(BenchError, match=reason):
        measure.check_losses(first, last)
    measure.check_losses([1.0], [0.5])


def test_a_measuring_process_reports_its_error_and_goes_on() -> None:
    result = child.run(job("trainmux:odd", no_such_argument=1))
    assert "TypeError" in result["error"]
    assert "no_such_argument" in result["detail"]


def test_a_measurement_can_be_written_as_json() -> None:
    result = json.loads(json.dumps(child.run(job("eager"))))
    measured = result["measurement"]
    assert len(measured["timing"]["block_ms"]) == 2
    assert measured["timing"]["num_members"] == WIDTH
    assert measured["num_parameters"] == sum(p.numel() for p in find_case("small:mlp").build(0).parameters())
    assert measured["memory"] is None
    assert measured["first_losses"][0] != measured["last_losses"][0]


def test_processes_beside_each_other_are_measured_together() -> None:
    measured = processes.measure_processes(job("mps"))
    assert measured.timing.num_members == WIDTH
    assert len(measured.timing.block_ms) == 2
    assert measured.timing.steps_per_block >= 1
    assert len(set(measured.first_losses)) == WIDTH
    assert all(a != b for a, b in zip(measured.first_losses, measured.last_losses, strict=True))


def test_mps_without_its_daemon_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BenchError, match="no MPS daemon"):
        processes.measure(job("mps", folder=str(tmp_path)))
    assert not list(tmp_path.iterdir())
    processes.stop_daemon(tmp_path)  # nothing to stop: no error


def test_the_mps_daemon_is_private_and_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools, folder = tmp_path / "tools", tmp_path / "job"
    tools.mkdir()
    folder.mkdir()
    log = tmp_path / "calls"
    control = tools / processes.CONTROL
    control.write_text(
        f'#!/bin/sh\nif [ "$1" = -d ]; then echo "start $CUDA_MPS_PIPE_DIRECTORY" >> {log}\n'
        f'else read line; echo "$line $CUDA_MPS_PIPE_DIRECTORY" >> {log}; fi\n',
        encoding="utf-8",
    )
    control.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")
    for name in ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"):
        monkeypatch.setenv(name, "")  # so that what the way sets is taken back after the test

    def fail(job: Job) -> None:
        raise BenchError("out of memory")

    monkeypatch.setattr(processes, "measure_processes", fail)
    with pytest.raises(BenchError, match="out of memory"):
        processes.measure(job("mps", folder=str(folder)))
    assert log.read_text(encoding="utf-8").splitlines() == [f"start {folder}/mps", f"quit -t 5 {folder}/mps"]


def test_the_table_of_ways() -> None:
    assert default_ways(on_cuda=False) == ["eager", "eager_vmap", "trainmux"]
    assert default_ways(on_cuda=True) == list(WAYS)
    assert find_way("trainmux:aten").name == "trainmux"
    with pytest.raises(KeyError):
        find_way("magic")


def test_every_full_size_workload_is_a_case() -> None:
    assert set(FULL_SIZE) < set(case_names())
    assert all(find_case(name).batch_sizes for name in case_names())
    assert "gpt2" in default_names()
    assert not any(name.endswith("_no_dropout") or ":" in name for name in default_names())


def test_models_of_a_case_differ_and_are_the_same_each_time() -> None:
    case = find_case("small:mlp")
    models = case.models(3, first=5)
    again = [case.models(1, first=number)[0] for number in (5, 6, 7)]
    for model, same in zip(models, again, strict=True):
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, same.get_parameter(name))
    weights = [next(iter(model.parameters())) for model in models]
    assert not torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[1], weights[2])
