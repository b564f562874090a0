"""The exceptions of the training core, grouped by the user's possible reaction.

    RolloutsError
    ├── InputError               the user changes something, then starts again (exit code 2)
    │   ├── ConfigError          a key, type or value of a configuration
    │   ├── DataError            an unusable row, file or tokenizer
    │   │   └── DemonstrationError   a demonstration in place of a prompt
    │   ├── CheckpointError      a checkpoint that is missing, damaged or of another model
    │   │   └── DivergedError    its weights give non-finite numbers
    │   ├── RewardError          a user's function that raised or returned something unusable
    │   ├── NoMemoryError        settings that need more memory than the machine has
    │   ├── NoSignalError        training ended because rewards gave no learning signal
    │   └── StoppedByRuleError   training ended because of a warning that `stop_on` names
    ├── EngineError              an inference server refused or answered nonsense
    │   ├── EngineUnavailableError   unreachable, restarting or overloaded: a retry may help
    │   ├── NoNumbersError       its weights give non-finite log-probs
    │   └── WeightSyncError      the engine did not take the published weights
    │       └── OtherVersionError    it reports another version than the published one
    ├── EnvironmentUnavailableError  an environment's sandbox or service failed: a retry may help
    │   └── EnvironmentOutageError   it failed so often that the run ends until it is repaired
    └── TrainingError            training itself failed
        ├── NonFiniteError       a loss or gradient that is not finite; the weights are unchanged
        ├── FullGPUError         a training step ran out of GPU memory
        └── MachineLostError     one of several training machines is gone: a restart may help

Exceptions take strings only, so they survive pickling and Prefect's storage.
"""


class RolloutsError(Exception):
    """Root of the errors that this package raises on purpose."""


class InputError(RolloutsError):
    """Unusable input of the user; the message has the expected and found values and the remedy."""


class ConfigError(InputError):
    """A configuration key, type or value that cannot be used."""


class DataError(InputError):
    """A data file, row or tokenizer that cannot be used."""


class DemonstrationError(DataError):
    """A row that already has a completion, although a prompt for the policy was expected."""


class CheckpointError(InputError):
    """A checkpoint that is missing, damaged or belongs to another model."""


class DivergedError(CheckpointError):
    """A checkpoint whose weights give non-finite numbers."""


class RewardError(InputError):
    """A user's reward, filter, generate function or environment that failed."""


class NoMemoryError(InputError):
    """Settings that need more memory than available; the message names the settings to lower."""


class NoSignalError(InputError):
    """RL without learning signal: all completions of each prompt had equal rewards for too many steps."""


class StoppedByRuleError(InputError):
    """RL that a warning ended, because `training.rl.stop_on` names its rule."""


class EngineError(RolloutsError):
    """An inference engine that refused a request or answered something unusable."""


class EngineUnavailableError(EngineError):
    """An engine that is unreachable or starting; the same request may work later."""


class EngineBusyError(EngineUnavailableError):
    """An overloaded engine.

    Args:
        problem: the engine's answer.
        retry_after_s: the delay that the engine requested, seconds; 0 without such a request.
    """

    def __init__(self, problem: str, retry_after_s: float = 0.0) -> None:
        super().__init__(problem)
        self.retry_after_s = retry_after_s


class EngineAnswerError(EngineError):
    """An engine's unusable answer that another engine would not give."""


class NoNumbersError(EngineAnswerError):
    """An engine whose weights give non-finite log-probs, for example after training diverged."""


class WeightSyncError(EngineError):
    """An engine that does not serve the published weights."""


class OtherVersionError(WeightSyncError):
    """An engine that took an update but reports another version.

    Args:
        problem: the published and the served version.
        served: the version that the engine reports.
    """

    def __init__(self, problem: str, served: str = "") -> None:
        super().__init__(problem)
        self.served = served


class EnvironmentUnavailableError(RolloutsError):
    """A dependency of an environment or reward failed: a sandbox, a service, a machine.

    The policy did not cause it, so its sample is not graded; the same conversation may work on a retry.
    """


class EnvironmentOutageError(EnvironmentUnavailableError):
    """An environment or reward that failed so often that it must be repaired first."""


class TrainingError(RolloutsError):
    """Training that cannot continue."""


class MachineLostError(TrainingError):
    """One of several training machines did not connect or is gone; progress since the last checkpoint is lost."""


class FullGPUError(TrainingError):
    """A training step that ran out of GPU memory."""


class NonFiniteError(TrainingError):
    """A loss or gradient that is not finite. The step's gradient is dropped; the weights are unchanged."""
