/* What the runtime does with many blocks in one call, so that a caller who let go of Python's lock for it gets it back
 * only once.
 *
 * ``hash`` is XXH3_64bits of whatever library brought it, ``copy`` is cudaMemcpy2DAsync of the CUDA runtime in this
 * process: nothing is linked, nothing is allocated, nothing is kept. */
#include <stddef.h>
#include <stdint.h>

typedef uint64_t (*hash_t)(const void *, size_t);
typedef int (*copy_t)(void *, size_t, const void *, size_t, size_t, size_t, int, void *);

/* Rows of an engine's memory at one pitch: block n has ``piece`` bytes of each, from n * piece on. */
typedef struct {
    uint64_t address, rows, pitch, piece, offset;
} stack_t;

enum { QUEUED = 0, CORRUPT = 1, REFUSED = 2 };
enum { BY_ADDRESS = 4 }; /* cudaMemcpyDefault */

/* The checksums of blocks of ``bytes`` bytes at ``memory + offsets[n]``. */
void kv_checksums(hash_t hash, const unsigned char *memory, const uint64_t *offsets, size_t blocks, size_t bytes,
                  uint64_t *sums) {
    for (size_t block = 0; block < blocks; block++) {
        sums[block] = hash(memory + offsets[block], bytes);
    }
}

/* Queue the copies of those blocks whose bytes have their checksum: each is read twice in a row, the second time out of
 * the processor's cache. ``ends`` says how each block ended; the first error of the device is returned, 0 without. */
int kv_verified_copies(hash_t hash, copy_t copy, void *stream, const stack_t *stacks, size_t stack_count,
                       const unsigned char *memory, const uint64_t *offsets, const uint64_t *slots,
                       const uint64_t *expected, size_t blocks, size_t bytes, unsigned char *ends) {
    int error = 0;
    for (size_t block = 0; block < blocks; block++) {
        const unsigned char *source = memory + offsets[block];
        if (hash(source, bytes) != expected[block]) {
            ends[block] = CORRUPT;
            continue;
        }
        ends[block] = error ? REFUSED : QUEUED;
        for (size_t n = 0; n < stack_count && !error; n++) {
            const stack_t *stack = stacks + n;
            error = copy((void *)(uintptr_t)(stack->address + slots[block] * stack->piece), stack->pitch,
                         source + stack->offset, stack->piece, stack->piece, stack->rows, BY_ADDRESS, stream);
            if (error) {
                ends[block] = REFUSED;
            }
        }
    }
    return error;
}
