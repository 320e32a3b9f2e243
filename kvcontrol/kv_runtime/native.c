/* Checksums of many blocks in one call, so that a caller who let go of Python's lock for it gets it back only once.
 *
 * ``hash`` is XXH3_64bits of whatever library brought it; block n has ``bytes`` bytes at ``memory + offsets[n]``. */
#include <stddef.h>
#include <stdint.h>

typedef uint64_t (*hash_t)(const void *, size_t);

void kv_checksums(hash_t hash, const unsigned char *memory, const uint64_t *offsets, size_t blocks, size_t bytes,
                  uint64_t *sums) {
    for (size_t block = 0; block < blocks; block++) {
        sums[block] = hash(memory + offsets[block], bytes);
    }
}
