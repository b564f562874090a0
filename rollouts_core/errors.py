"""What can go wrong in the training core, told apart by what the reader can do about it.

    RolloutsError
    ├── InputError               the user changes something, then starts again (exit code 2)
    │   ├── ConfigError          a key, type or value of a configuration
    │   ├── DataError            a row, a file or a tokenizer that does not fit
    │   │   └── DemonstrationError   a demonstration where a prompt belongs
    │   ├── CheckpointError      a checkpoint that is missing, damaged or of another model
    │   │   └── DivergedError    one whose weights compute no numbers
    │   ├── RewardError          a user's function that raised or returned something unusable
    │   ├── NoMemoryError        settings that ask for more memory than the machine has
    │   └── NoSignalError        rewards that taught nothing for so long that the training ended
    ├── EngineError              an inference server refused or answered nonsense
    │   ├── EngineUnavailableError   not reachable, restarting or overloaded: asking again may help
    │   ├── NoNumbersError       its weights give log-probs that are no finite numbers
    │   └── WeightSyncError      the engine did not take the weights that were published
    │       └── OtherVersionError    it reports another version than it was given
    ├── EnvironmentUnavailableError  an environment's sandbox or service failed: beginning again may help
    │   └── EnvironmentOutageError   it failed so often that the run ends until it is mended
    └── TrainingError            training itself broke
        ├── NonFiniteError       a loss or gradient that is not a finite number; the weights are as before
        └── MachineLostError     one of the machines that train together is gone: starting again may help

Exceptions take strings only, so they survive pickling and Prefect's storage.
"""


class RolloutsError(Exception):
    """The root of every error this package raises on purpose."""


class InputError(RolloutsError):
    """Something the user gave does not work; the message says what was expected, found and to do."""


class ConfigError(InputError):
    """A configuration key, type or value that cannot be used."""


class DataError(InputError):
    """A data file, row or tokenizer that cannot be used."""


class DemonstrationError(DataError):
    """A row that shows the completion itself, where a prompt is to be completed by the policy."""


class CheckpointError(InputError):
    """A checkpoint that is missing, damaged or belongs to another model."""


class DivergedError(CheckpointError):
    """A checkpoint whose weights compute no numbers."""


class RewardError(InputError):
    """A reward, filter or generation function or an environment of the user's that failed."""


class NoMemoryError(InputError):
    """Settings that ask for more memory than there is; the message names those to lower."""


class NoSignalError(InputError):
    """Rewards of RL that told no completion of a prompt from another, for so many steps that the training ended."""


class EngineError(RolloutsError):
    """An inference engine that refused a request or answered something unusable."""


class EngineUnavailableError(EngineError):
    """An engine that cannot be reached or is starting; the same request may work later."""


class EngineBusyError(EngineUnavailableError):
    """An engine that has too much to do.

    Args:
        problem: what it answered.
        retry_after_s: how long it asked to be left alone; 0 where it said nothing.
    """

    def __init__(self, problem: str, retry_after_s: float = 0.0) -> None:
        super().__init__(problem)
        self.retry_after_s = retry_after_s


class EngineAnswerError(EngineError):
    """An engine that answered something unusable, as another one would not."""


class NoNumbersError(EngineAnswerError):
    """An engine whose weights compute no finite log-probs, as those of a training that diverged."""


class WeightSyncError(EngineError):
    """An engine that does not serve the weights that were published to it."""


class OtherVersionError(WeightSyncError):
    """An engine that took an update, and reports another version.

    Args:
        problem: what it was given, and what it serves.
        served: the version that it reports.
    """

    def __init__(self, problem: str, served: str = "") -> None:
        super().__init__(problem)
        self.served = served


class EnvironmentUnavailableError(RolloutsError):
    """Something that an environment or a reward stands on failed: a sandbox, a service, a machine.

    The policy has no part in it, so what it did is not graded; the same conversation may work when it is begun again.
    """


class EnvironmentOutageError(EnvironmentUnavailableError):
    """An environment or a reward that failed so often that going on makes no sense before it is mended."""


class TrainingError(RolloutsError):
    """Training that cannot go on."""


class MachineLostError(TrainingError):
    """One of the machines that train together did not come, or is gone; what is not in a checkpoint is lost."""


class NonFiniteError(TrainingError):
    """A loss or gradient that is not a finite number. The step's gradient is dropped, the weights are as before."""
