// driver FILE SIZE ADDRESS ARGUMENT...: call `kernel` on memory that is a file
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>

extern void kernel(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                   int64_t, int64_t, int64_t, int64_t);

int main(int count, char **given) {
    int64_t a[16] = {0}, size = atoll(given[2]);
    void *where = (void *)atoll(given[3]);
    int file = open(given[1], O_RDWR);
    if (mmap(where, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0) != where) return 1;
    for (int i = 4; i < count && i < 20; i++) a[i - 4] = atoll(given[i]);
    kernel(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12], a[13], a[14], a[15]);
    return 0;
}
