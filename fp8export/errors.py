"""Every error a user can meet, each with what went wrong, where, and what to do.

Fp8ExportError
├── RequestError          an option names something that is not there                          exit 2
├── CheckpointError       unreadable, corrupt, unknown or ambiguous input                      exit 4
│   └── UnsafePickleError a pickle names something outside the allow-list                      exit 7
├── ScaleError            a scale is missing, zero, infinite or in conflict                    exit 4
├── UnsupportedError      the target cannot express the plan                                   exit 5
├── OutputError           destination exists, belongs to another run, or cannot be written     exit 6
├── VerifyError           a finished folder would be misread by a server                       exit 3
└── ParityError           the export is not the trained model within tolerance                 exit 3
"""


class Fp8ExportError(Exception):
    """Base of all expected failures.

    `what` is one sentence, `where` the file and key, `hint` the next step for the user.
    """

    exit_code = 1

    def __init__(self, what: str, *, where: str = "", hint: str = "") -> None:
        self.what, self.where, self.hint = what, where, hint
        parts = [what]
        if where:
            parts.append(f"  where: {where}")
        if hint:
            parts.append(f"  what to do: {hint}")
        super().__init__("\n".join(parts))


class RequestError(Fp8ExportError):
    exit_code = 2


class CheckpointError(Fp8ExportError):
    exit_code = 4


class UnsafePickleError(CheckpointError):
    exit_code = 7


class ScaleError(Fp8ExportError):
    exit_code = 4


class UnsupportedError(Fp8ExportError):
    exit_code = 5


class OutputError(Fp8ExportError):
    exit_code = 6


class VerifyError(Fp8ExportError):
    exit_code = 3


class ParityError(Fp8ExportError):
    exit_code = 3
