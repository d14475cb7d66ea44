"""Places of the words that `read_loop.py` shares with Python: setup, layers, jobs and counters, all int64.

The setup has addresses and sizes that do not change. Errors are codes; `READ_FAILED` comes with an errno and
`NOT_THE_CHECKSUM` with the CRC-32 that was found.
"""

from itertools import count

CHUNK_NBYTES = 1 << 20  # of one read; larger experts take several
PAGE_NBYTES = 4096
WINDOW = 1024  # slots among which a victim is chosen
NEVER_USED = -1e30  # log2 of the use count of an expert that only prefill streams used
SLOT_BITS, EXPERT_BITS = 22, 10  # of an answer; its upper half is the request's number

_next = count().__next__
# words of the setup: sizes
LAYERS, EXPERTS, SLOTS, SLOT_NBYTES, HALF_LIFE, VERIFY, BANDWIDTH = (_next() for _ in range(7))
# addresses: the mailbox
HEADER, LIST, ANSWERS = (_next() for _ in range(3))
# slots: their memory, slot of each expert [L, E], expert of each slot [S], its uses, the request that needs it
MEMORY, SLOT_OF, OWNERS, USES, HELD = (_next() for _ in range(5))
# experts: modification time of the file whose checksum was right, and checksums [L, E]
VERIFIED, SUMS = (_next() for _ in range(2))
# rows of layers and jobs, CRC of each chunk of a job, counters
LAYER_ROWS, JOBS, CRCS, COUNTERS = (_next() for _ in range(4))
# tables of `crc32.py`: for steps, a quarter of a chunk, a chunk
STEP_TABLE, QUARTER_TABLE, CHUNK_TABLE = (_next() for _ in range(3))
# libc functions, and numbers of system calls
READ, FADVISE, SLEEP_UNTIL, WHERE_ERRNO, SYSCALL, FSTAT = (_next() for _ in range(6))
SETUP_WORDS = _next()

# words of a layer; REST_TABLE advances a CRC by the bytes of the last chunk, biases follow the expert's bytes
HANDLE, DIRECT, STRIDE, NBYTES, CHUNKS, REST_TABLE, BIASES, BIAS_NBYTES = range(8)
LAYER_WORDS = 8

# words of a job; JOB_MODIFIED is the file's modification time if the checksum is to be verified, else 0
JOB_EXPERT, JOB_SLOT, JOB_LEFT, JOB_ERROR, JOB_DETAIL, JOB_MODIFIED = range(6)
JOB_WORDS = 8

# counters; FAIL_CODE is written last
READS, READ_NBYTES, BUSY_NS, HITS, CLOCK, WINDOW_FROM, ANSWERED, FINISHED, BASE, BUSY_UNTIL = range(10)
FAIL_LOCK, FAIL_CODE, FAIL_LAYER, FAIL_EXPERT, FAIL_DETAIL = range(10, 15)
COUNTER_WORDS = 16

READ_FAILED, TRUNCATED, NOT_THE_CHECKSUM, NO_SLOT, BAD_LAYER, BAD_EXPERT = range(1, 7)

# of struct stat on Linux, 64 bits
MODIFIED_S_AT, MODIFIED_NS_AT, STAT_NBYTES = 88, 96, 256
FSTAT_NUMBERS = {"x86_64": 5, "aarch64": 80}
DONTNEED = 4  # POSIX_FADV_DONTNEED
