"""What tests of several clients need."""

import pytest
import torch


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    """A gloo world of one process, with the variables that launchers set."""
    variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    store = tmp_path_factory.mktemp("store") / "file"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{store}", rank=0, world_size=1
        )
        yield
        torch.distributed.destroy_process_group()


@pytest.fixture
def amp_ends():
    """Take back what amp.initialize has patched, after the test."""
    from apex import amp

    yield
    if hasattr(amp._amp_state, "handle"):
        amp._amp_state.handle._deactivate()


@pytest.fixture
def saving_stop():
    """Return a function that makes a callback of transformers, which saves at a step and stops."""
    from transformers import TrainerCallback

    def make(step):
        class SavingStop(TrainerCallback):
            def on_step_end(self, args, state, control, **kwargs):
                control.should_save = control.should_training_stop = state.global_step == step

        return SavingStop()

    return make
