"""The exceptions of the training core, grouped by how the user can react to them.

    RolloutsError
    ├── InputError               the user changes something, then starts again (exit code 2)
    │   ├── ConfigError          a key, type or value of a configuration
    │   ├── DataError            a row, file or tokenizer that cannot be used
    │   │   └── DemonstrationError   a row with a completion, although a prompt was expected
    │   ├── CheckpointError      a checkpoint that is missing, damaged or of another model
    │   │   └── DivergedError    the checkpoint's weights give NaN or infinite numbers
    │   ├── RewardError          a user's function raised an error or returned an unusable value
    │   ├── NoMemoryError        settings that need more memory than the machine has
    │   ├── NoSignalError        training ended because rewards gave no learning signal
    │   └── StoppedByRuleError   training ended by a warning that `stop_on` or `roll_back_on` names
    ├── EngineError              an inference server refused a request or gave an unusable answer
    │   ├── EngineUnavailableError   the engine is unreachable, restarting or overloaded: a retry may help
    │   ├── NoNumbersError       the engine's weights give NaN or infinite log-probs
    │   └── WeightSyncError      the engine did not take the published weights
    │       └── OtherVersionError    the engine reports another weight version than the published one
    ├── EnvironmentUnavailableError  an environment's sandbox or service failed: a retry may help
    │   └── EnvironmentOutageError   sandbox or service failed so often that the run ends: repair the cause first
    └── TrainingError            training itself failed
        ├── NonFiniteError       a loss or gradient is NaN or infinite; the weights are unchanged
        ├── FullGPUError         a training step ran out of GPU memory
        └── MachineLostError     one of several training machines is gone: a restart may help

Exceptions take only strings as arguments, so that they can be pickled and stored by Prefect.
"""


class RolloutsError(Exception):
    """Root of the errors that this package raises on purpose."""


class InputError(RolloutsError):
    """Input of the user that cannot be used.

    The text says what was expected, what was found and how to correct the input.
    """


class ConfigError(InputError):
    """A configuration key, type or value that cannot be used."""


class DataError(InputError):
    """A data file, row or tokenizer that cannot be used."""


class DemonstrationError(DataError):
    """A row that already has a completion, although a prompt for the policy was expected."""


class CheckpointError(InputError):
    """A checkpoint that is missing, damaged or belongs to another model."""


class DivergedError(CheckpointError):
    """A checkpoint whose weights give NaN or infinite numbers."""


class RewardError(InputError):
    """A user's reward, filter, generate function or environment failed."""


class NoMemoryError(InputError):
    """The settings need more memory than is available. The message names the settings to lower."""


class NoSignalError(InputError):
    """RL ended because it had no learning signal: for too many steps, all completions of each prompt had equal
    rewards.
    """


class StoppedByRuleError(InputError):
    """The training ended because a rule in `stop_on` raised a warning, or a rule in `roll_back_on` before any
    checkpoint had a score."""


class EngineError(RolloutsError):
    """An inference engine refused a request or gave an unusable answer."""


class EngineUnavailableError(EngineError):
    """An engine is unreachable or still starting. A retry of the request may work later."""


class EngineBusyError(EngineUnavailableError):
    """An engine is overloaded.

    Args:
        problem: the engine's answer.
        retry_after_s: delay before a retry that the engine requested, seconds; 0 if the engine requested none.
    """

    def __init__(self, problem: str, retry_after_s: float = 0.0) -> None:
        super().__init__(problem)
        self.retry_after_s = retry_after_s


class EngineAnswerError(EngineError):
    """An engine gave an unusable answer to a request that other engines could answer."""


class NoNumbersError(EngineAnswerError):
    """An engine's weights give NaN or infinite log-probs, for example after training diverged."""


class WeightSyncError(EngineError):
    """An engine does not serve the published weights."""


class OtherVersionError(WeightSyncError):
    """An engine took an update but reports another weight version than the published one.

    Args:
        problem: names the published and the reported version.
        served: the version that the engine reports.
    """

    def __init__(self, problem: str, served: str = "") -> None:
        super().__init__(problem)
        self.served = served


class EnvironmentUnavailableError(RolloutsError):
    """A sandbox, a service or a machine that an environment or reward needs failed.

    The policy did not cause the failure, so the sample is not graded. A retry of the conversation may work.
    """


class EnvironmentOutageError(EnvironmentUnavailableError):
    """An environment or reward failed so often that the run ends. The user must repair the cause first."""


class TrainingError(RolloutsError):
    """Training cannot continue."""


class MachineLostError(TrainingError):
    """One of several training machines did not connect or is gone. The steps since the last checkpoint are lost."""


class FullGPUError(TrainingError):
    """A training step that ran out of GPU memory."""


class NonFiniteError(TrainingError):
    """A loss or gradient is NaN or infinite. The step's gradient is dropped; the weights are unchanged."""
