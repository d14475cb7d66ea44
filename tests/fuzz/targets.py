"""All that takes input from strangers."""

from tests.fuzz.command_targets import TARGETS as COMMANDS
from tests.fuzz.file_targets import TARGETS as FILES
from tests.fuzz.format_targets import TARGETS as FORMATS
from tests.fuzz.kept_targets import TARGETS as KEPT
from tests.fuzz.op_targets import TARGETS as OPS
from tests.fuzz.request_targets import TARGETS as REQUESTS

TARGETS = [*FILES, *FORMATS, *KEPT, *REQUESTS, *COMMANDS, *OPS]
