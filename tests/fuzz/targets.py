"""All fuzz targets."""

from tests.fuzz.batch_targets import TARGETS as BATCHES
from tests.fuzz.cache_targets import TARGETS as CACHES
from tests.fuzz.command_targets import TARGETS as COMMANDS
from tests.fuzz.file_targets import TARGETS as FILES
from tests.fuzz.format_targets import TARGETS as FORMATS
from tests.fuzz.op_targets import TARGETS as OPS
from tests.fuzz.request_targets import TARGETS as REQUESTS

TARGETS = [*FILES, *FORMATS, *CACHES, *REQUESTS, *BATCHES, *COMMANDS, *OPS]
