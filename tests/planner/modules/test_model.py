"""Foreign modules in place of a model."""

from headrace.planner.modules.model import ModuleKind, ModuleModel, TracedModules
from headrace.planner.traces.trace import LayerTrace, ModelTrace


def test_a_plan_names_modules_by_a_hash_under_fixed_keys() -> None:
    kind = ModuleKind(
        name="Linear (1, 4)",
        description="Linear(in_features=4, out_features=8, bias=True)",
        parameters=(("weight", (8, 4)), ("bias", (8,))),
        input_shape=(1, 4),
    )
    trace = ModelTrace(1, 1, (0, 0), (), LayerTrace("end", {}, (), (), 1, 1))
    modules = TracedModules(ModuleModel("mine:linear", (kind,), (0, 0)), trace)
    assert modules.hash == "5fceb45d1530bbb1"  # in plan files
