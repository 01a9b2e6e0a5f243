"""What a name tells of an event of the host."""

from tracepage.causes.host_time import CAUSES, NOTHING, OPERATOR, Stacks, named_code, own_line
from tracepage.readers.trace_events import Event

import pytest


def named(kind, name):
    place = named_code(Event(kind, name, (1, 1), 0, 1))
    return {NOTHING: "nothing", OPERATOR: "operator"}.get(place, CAUSES[place])


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("cudaMalloc", "allocation"),
        ("cudaFreeHost", "allocation"),
        ("cuMemSetAccess", "allocation"),
        ("hipHostMalloc", "allocation"),
        ("hipFree", "allocation"),
        ("cudaStreamSynchronize", "synchronization"),
        ("hipDeviceSynchronize", "synchronization"),
        ("hipEventSynchronize", "synchronization"),
        ("cuModuleLoadData", "compilation"),
        ("cudaGraphInstantiate", "compilation"),
        ("hipModuleLoadData", "compilation"),
        ("cuLaunchKernelEx", "launches"),
        ("cudaGraphLaunch", "launches"),
        ("hipExtModuleLaunchKernel", "launches"),
        ("hipMemcpyWithStream", "launches"),
        ("cudaMemsetAsync", "launches"),
        ("cudaStreamWaitEvent", "nothing"),
        ("cudaMemGetInfo", "nothing"),
    ],
)
def test_calls_of_the_runtime(name, cause):
    assert named("launch", name) == cause


@pytest.mark.parametrize(
    ("kind", "name", "cause"),
    [
        ("annotation", "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", "input"),
        ("annotation", "[pl][profile][_TrainingEpochLoop].train_dataloader_next", "input"),
        ("annotation", "get_batch", "input"),
        ("annotation", "save_checkpoint", "saving"),
        ("annotation", "Optimizer.step#AdamW.step", "nothing"),
        ("annotation", "ProfilerStep#3", "nothing"),
        ("operator", "_compile.compile_inner (dynamo_timed)", "compilation"),
        ("operator", "entire_backward_compile", "compilation"),
        ("operator", "Torch-Compiled Region: 0/0", "operator"),
        ("operator", "TorchDynamo Cache Lookup", "operator"),
        ("operator", "aten::item", "synchronization"),
        ("operator", "CheckpointFunction", "operator"),
        ("operator", "gloo:all_reduce", "communication"),
    ],
)
def test_operators_and_annotations(kind, name, cause):
    assert named(kind, name) == cause


def test_the_line_is_the_innermost_that_is_no_librarys():
    times = [
        ("main.py(1): main", 0, 90),
        ("main.py(9): load", 10, 80),
        ("torch/a.py(3): f", 20, 70),
    ]
    frames = [Event("frame", name, (1, 1), start, end - start) for name, start, end in times]
    stacks = Stacks(frames)
    assert stacks.names(25, 65) == [name for name, *_ in times[::-1]]
    assert own_line(stacks.names(25, 65)) == "main.py(9): load"
    assert own_line(stacks.names(0, 90)) == "main.py(9): load"
    assert own_line(stacks.names(82, 90)) == "main.py(1): main"
    assert stacks.names(-40, 130) == ["main.py(1): main"], "others ran for less than half of it"
    assert stacks.names(25, 65, (1, 2)) == [] and own_line([]) == ""
