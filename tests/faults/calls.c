/* Loaded before the C library: the n-th call that changes a file below a folder, reads one there, or asks for much memory,
   fails, is done by half, or is the process's last. Everything goes through here: Python, Rust, torch. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { WRITES = 1, REMOVALS = 2, READS = 4, MEMORY = 8 };
enum { FAIL, FAIL_FROM_HERE, TEAR, KILL };

#define LARGE (32 << 10) /* bytes of an allocation that may fail */

static struct {
    int kinds, how, error;
    long at, seen;
    size_t length;
    char folder[PATH_MAX], hit[32];
} plan;
static pthread_mutex_t turn = PTHREAD_MUTEX_INITIALIZER;

void faults_arm(const char *folder, int kinds, long at, int how, int error)
{
    strncpy(plan.folder, folder, sizeof plan.folder - 1);
    plan.length = strlen(plan.folder);
    plan.at = at, plan.how = how, plan.error = error, plan.seen = 0, plan.hit[0] = 0;
    plan.kinds = kinds;
}

long faults_disarm(void)
{
    plan.kinds = 0;
    return plan.seen;
}

const char *faults_hit(void) { return plan.hit; }

static int below(const char *path)
{
    return strncmp(path, plan.folder, plan.length) == 0 && (path[plan.length] == '/' || path[plan.length] == 0);
}

static int fd_below(int fd)
{
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0)
        return 0;
    path[length] = 0;
    return below(path);
}

static int name_below(int folder, const char *path)
{
    return path[0] == '/' ? below(path) : folder != AT_FDCWD && fd_below(folder);
}

/* whether this call is the one; a process that is killed does not come back */
static int is_it(int kind, const char *name)
{
    if (!(plan.kinds & kind))
        return 0;
    pthread_mutex_lock(&turn);
    long n = ++plan.seen;
    int found = n == plan.at || (plan.how == FAIL_FROM_HERE && n > plan.at && plan.at > 0);
    if (found && !plan.hit[0])
        strncpy(plan.hit, name, sizeof plan.hit - 1);
    pthread_mutex_unlock(&turn);
    return found;
}

static long struck(void)
{
    if (plan.how == KILL)
        kill(getpid(), SIGKILL);
    errno = plan.error;
    return -1;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define WATCHED(kind, test, name) (plan.kinds & (kind) && (test) && is_it(kind, #name))

#define CALL(type, name, kind, test, parameters, arguments) \
    type name parameters \
    { \
        if (WATCHED(kind, test, name)) \
            return struck(); \
        return REAL(name) arguments; \
    }

#define OPEN(name, parameters, arguments, test) \
    int name parameters \
    { \
        va_list rest; \
        va_start(rest, flags); \
        int mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, int) : 0; \
        va_end(rest); \
        int kind = flags & (O_WRONLY | O_RDWR | O_CREAT | O_TRUNC) ? WRITES : READS; \
        if (WATCHED(kind, test, name)) \
            return struck(); \
        return REAL(name) arguments; \
    }

OPEN(open, (const char *path, int flags, ...), (path, flags, mode), name_below(AT_FDCWD, path))
OPEN(open64, (const char *path, int flags, ...), (path, flags, mode), name_below(AT_FDCWD, path))
OPEN(openat, (int folder, const char *path, int flags, ...), (folder, path, flags, mode), name_below(folder, path))
OPEN(openat64, (int folder, const char *path, int flags, ...), (folder, path, flags, mode), name_below(folder, path))

/* a torn write puts half of it there, and the next one fails */
#define TORN(name, parameters, half, arguments) \
    ssize_t name parameters \
    { \
        if (WATCHED(WRITES, fd_below(fd), name)) { \
            if (plan.how == TEAR || plan.how == KILL) \
                (void)!REAL(name) half; \
            return struck(); \
        } \
        return REAL(name) arguments; \
    }

TORN(write, (int fd, const void *data, size_t size), (fd, data, size / 2), (fd, data, size))
TORN(pwrite, (int fd, const void *data, size_t size, off_t at), (fd, data, size / 2, at), (fd, data, size, at))
TORN(pwrite64, (int fd, const void *data, size_t size, off64_t at), (fd, data, size / 2, at), (fd, data, size, at))
TORN(writev, (int fd, const struct iovec *parts, int count), (fd, parts, 1), (fd, parts, count))

CALL(ssize_t, sendfile, WRITES, fd_below(out), (int out, int in, off_t *at, size_t size), (out, in, at, size))
CALL(ssize_t, sendfile64, WRITES, fd_below(out), (int out, int in, off64_t *at, size_t size), (out, in, at, size))
CALL(ssize_t, copy_file_range, WRITES, fd_below(out),
     (int in, off64_t *from, int out, off64_t *to, size_t size, unsigned flags), (in, from, out, to, size, flags))
CALL(int, ftruncate, WRITES, fd_below(fd), (int fd, off_t size), (fd, size))
CALL(int, ftruncate64, WRITES, fd_below(fd), (int fd, off64_t size), (fd, size))
CALL(int, fsync, WRITES, fd_below(fd), (int fd), (fd))
CALL(int, fdatasync, WRITES, fd_below(fd), (int fd), (fd))
CALL(int, mkdir, WRITES, below(path), (const char *path, mode_t mode), (path, mode))
CALL(int, mkdirat, WRITES, name_below(folder, path), (int folder, const char *path, mode_t mode), (folder, path, mode))
CALL(int, rename, WRITES, below(to), (const char *from, const char *to), (from, to))
CALL(int, renameat, WRITES, name_below(there, to), (int here, const char *from, int there, const char *to), (here, from, there, to))
CALL(int, renameat2, WRITES, name_below(there, to),
     (int here, const char *from, int there, const char *to, unsigned flags), (here, from, there, to, flags))
CALL(int, unlink, REMOVALS, below(path), (const char *path), (path))
CALL(int, unlinkat, REMOVALS, name_below(folder, path), (int folder, const char *path, int flags), (folder, path, flags))
CALL(int, rmdir, REMOVALS, below(path), (const char *path), (path))
CALL(int, chmod, WRITES, below(path), (const char *path, mode_t mode), (path, mode))
CALL(int, fchmod, WRITES, fd_below(fd), (int fd, mode_t mode), (fd, mode))
CALL(int, utimensat, WRITES, name_below(folder, path),
     (int folder, const char *path, const struct timespec times[2], int flags), (folder, path, times, flags))
CALL(ssize_t, read, READS, fd_below(fd), (int fd, void *data, size_t size), (fd, data, size))
CALL(ssize_t, pread64, READS, fd_below(fd), (int fd, void *data, size_t size, off64_t at), (fd, data, size, at))
CALL(ssize_t, preadv, READS, fd_below(fd), (int fd, const struct iovec *parts, int count, off_t at), (fd, parts, count, at))

/* memory: glibc's own names are there before anything else is */
void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t), *__libc_memalign(size_t, size_t);

static int no_memory(size_t size, const char *name)
{
    if (size < LARGE || !(plan.kinds & MEMORY) || !is_it(MEMORY, name))
        return 0;
    errno = ENOMEM;
    return 1;
}

void *malloc(size_t size) { return no_memory(size, "malloc") ? NULL : __libc_malloc(size); }
void *calloc(size_t n, size_t size) { return no_memory(n * size, "calloc") ? NULL : __libc_calloc(n, size); }
void *realloc(void *old, size_t size) { return no_memory(size, "realloc") ? NULL : __libc_realloc(old, size); }

int posix_memalign(void **out, size_t alignment, size_t size)
{
    if (no_memory(size, "posix_memalign"))
        return ENOMEM;
    *out = __libc_memalign(alignment, size);
    return *out || !size ? 0 : ENOMEM;
}
