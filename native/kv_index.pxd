"""What each engine holds, told by its KV events. The story is in kv_index.pyx."""

cimport cython
from libc.stdint cimport uint8_t, uint32_t, uint64_t

from native.kv_events cimport Event, Scratch
from native.open_table cimport Table

cdef enum:
    GROUPS = 16
    TIER_SLOTS = 48  # MEDIA * GROUPS


# A KV block by its own hash. Free blocks have no set and are linked by `parent`.
cdef struct Block:
    uint64_t own
    uint64_t engine  # its key, where it has exactly one
    uint32_t parent
    uint32_t holders  # a set of slots
    uint32_t keys  # NO_KEYS, ONE_KEY, or the first of its Keys
    uint32_t children  # and RECENT


# One of several engine hashes of a block. Free keys are linked by `next` and have no set.
cdef struct Key:
    uint64_t engine
    uint32_t block
    uint32_t next
    uint32_t holders  # who stored the block under this hash
    uint32_t unused


# A set of slots, shared by all blocks that are held by the same. Free sets have no slots and are linked by `mapped`.
cdef struct HolderSet:
    uint64_t hash
    uint32_t* slots  # ascending
    uint32_t check
    uint32_t n
    uint32_t refs
    uint32_t mapped


# A rank's share in one medium and group.
cdef struct Slot:
    uint64_t word  # random; the hash of a set is the exclusive or of its slots' words
    uint64_t pairs  # blocks whose holders contain it
    uint32_t check_word
    uint32_t rank
    uint32_t next_free
    uint8_t medium
    uint8_t group
    uint8_t state


cdef struct Rank:
    uint64_t blocks
    uint64_t evicted
    uint64_t stamp
    uint32_t slot_of[TIER_SLOTS]
    uint32_t slot_count
    uint32_t groups  # mask of those seen
    uint32_t in_medium[3]  # scratch of match: groups that hold the block, by medium
    uint32_t alive  # scratch of match: tiers unbroken so far
    uint32_t block_size
    uint32_t main_group
    uint32_t oldest_orphan
    uint32_t newest_orphan
    uint32_t orphans
    bint live
    bint incomplete


# A BlockStored that waits for its parent. Free ones have no memory and are linked by `next`.
cdef struct Orphan:
    uint64_t* hashes  # `count` of them, then the event's bytes
    uint64_t parent
    uint64_t bytes
    uint32_t size  # bytes of the event
    uint32_t count
    uint32_t kept  # its first hashes that were not removed since
    uint32_t rank
    uint32_t next  # of the same parent and rank
    uint32_t older
    uint32_t newer
    uint32_t slot_key  # medium and group


# A hash table of references to blocks or keys, 4 bytes a slot.
cdef struct RefTable:
    uint32_t* slots
    uint64_t capacity
    uint64_t used
    uint64_t most


cdef struct Counts:
    uint64_t stored
    uint64_t removed
    uint64_t cleared
    uint64_t unknown
    uint64_t orphans
    uint64_t joined
    uint64_t orphans_dropped
    uint64_t duplicates
    uint64_t retiered
    uint64_t absent
    uint64_t other_size
    uint64_t refused
    bint block_size_changed


@cython.final
cdef class Applied:
    cdef Counts counts
    cdef readonly double timestamp
    cdef readonly long data_parallel_rank
    cdef readonly bint malformed


@cython.final
cdef class KvIndex:
    cdef Block** block_chunks
    cdef uint32_t block_chunk_room
    cdef uint32_t block_chunk_count
    cdef uint32_t block_end
    cdef uint32_t block_free
    cdef uint32_t block_live
    cdef Key** key_chunks
    cdef uint32_t key_chunk_room
    cdef uint32_t key_chunk_count
    cdef uint32_t key_end
    cdef uint32_t key_free
    cdef uint32_t key_live
    cdef RefTable own_table
    cdef RefTable key_table
    cdef HolderSet* sets
    cdef uint32_t set_room
    cdef uint32_t set_end
    cdef uint32_t set_free
    cdef uint32_t set_live
    cdef Table set_table
    cdef Slot* slots
    cdef uint32_t slot_room
    cdef uint32_t slot_end
    cdef uint32_t slot_free
    cdef uint32_t dead_slots
    cdef Rank* ranks
    cdef uint32_t* alive
    cdef uint32_t rank_room
    cdef uint32_t rank_end
    cdef Table extra_refs  # (engine hash, slot) -> references beyond the first
    cdef Orphan* orphans
    cdef uint32_t orphan_room
    cdef uint32_t orphan_end
    cdef uint32_t orphan_free
    cdef uint64_t orphan_bytes
    cdef Table orphan_parents  # (parent's engine hash, rank) -> first orphan
    cdef Table orphan_hashes  # (engine hash, rank) -> the orphan that has it
    cdef Scratch scratch
    cdef uint64_t secret[2]
    cdef uint64_t stamp
    cdef uint64_t live_pairs
    cdef uint64_t dead_pairs
    cdef uint64_t bytes_used
    cdef uint64_t limit_bytes
    cdef uint64_t fail_in
    cdef uint32_t hand
    cdef uint32_t memo_from
    cdef uint32_t memo_slot
    cdef uint32_t memo_to
    cdef uint32_t orphan_work
    cdef readonly object matched_gpu
    cdef readonly object matched_cpu
    cdef readonly object matched_any

    cdef uint32_t match_blocks(
        self, const uint64_t* blocks, uint32_t n, uint32_t block_size, uint32_t* gpu, uint32_t* cpu, uint32_t* all_tiers
    ) noexcept nogil

    cdef Rank* rank_at(self, Py_ssize_t rank) except NULL
    cdef void* allocate(self, void* old, uint64_t old_size, uint64_t size, uint64_t limit) noexcept nogil
    cdef void release(self, void* old, uint64_t size) noexcept nogil
    cdef bint grow_table(self, Table* table, uint64_t more, uint64_t limit) noexcept nogil
    cdef bint grow_refs(self, RefTable* table, bint of_keys) noexcept nogil
    cdef void put_ref(self, RefTable* table, uint64_t hash, uint32_t ref) noexcept nogil
    cdef void erase_ref(self, RefTable* table, bint of_keys, uint64_t hash, uint32_t ref) noexcept nogil
    cdef uint32_t find_own(self, uint64_t own) noexcept nogil
    cdef uint32_t find_key(self, uint64_t engine, uint32_t rank, uint32_t slot) noexcept nogil
    cdef uint32_t block_of(self, uint32_t ref) noexcept nogil
    cdef bint grow_blocks(self) noexcept nogil
    cdef bint make_room(self) noexcept nogil
    cdef uint32_t new_key(self, uint64_t engine, uint32_t block, uint32_t holders) noexcept nogil
    cdef uint32_t set_changed(self, uint32_t of, uint32_t slot, bint add) noexcept nogil
    cdef void unref_set(self, uint32_t of) noexcept nogil
    cdef void drop_unused_set(self, uint32_t of) noexcept nogil
    cdef bint set_has(self, uint32_t of, uint32_t slot) noexcept nogil
    cdef bint set_has_rank(self, uint32_t of, uint32_t rank) noexcept nogil
    cdef uint32_t slot_for(self, uint32_t rank, uint32_t medium, uint32_t group) noexcept nogil
    cdef void free_slot(self, uint32_t slot) noexcept nogil
    cdef bint give_block(self, uint32_t block, uint32_t slot) noexcept nogil
    cdef int hold(self, uint32_t ref, uint32_t slot) noexcept nogil
    cdef void count_extra(self, uint64_t engine, uint32_t slot, uint32_t rank) noexcept nogil
    cdef uint32_t attach(self, uint64_t own, uint64_t engine, uint32_t parent, uint32_t slot, int* how) noexcept nogil
    cdef void let_go(self, uint32_t ref, uint64_t engine, uint32_t slot) noexcept nogil
    cdef void unlink_key(self, uint32_t key) noexcept nogil
    cdef void block_without_keys(self, uint32_t block) noexcept nogil
    cdef void free_block(self, uint32_t block) noexcept nogil
    cdef void drop_block(self, uint32_t block) noexcept nogil
    cdef uint32_t evict(self, uint32_t count) noexcept nogil
    cdef void forget(self, uint32_t rank) noexcept nogil
    cdef void purge_if_worth(self) noexcept nogil
    cdef void purge(self) noexcept nogil
    cdef void forget_mapped(self) noexcept nogil
    cdef bint purge_keys(self, uint32_t block) noexcept nogil
    cdef uint64_t soft_limit(self) noexcept nogil
    cdef uint32_t living(self, uint32_t of) noexcept nogil
    cdef void trim(self) noexcept nogil
    cdef void remove(self, uint32_t rank, const Event* event, Counts* counts) noexcept nogil
    cdef void retier(self, uint32_t rank, const Event* event, Counts* counts) noexcept nogil
    cdef bint right_size(self, uint32_t rank, const Event* event, Counts* counts) noexcept nogil
    cdef void store(self, uint32_t rank, const Event* event, Counts* counts) noexcept nogil
    cdef void store_and_join(self, uint32_t rank, Event* event, Counts* counts) noexcept nogil
    cdef void find_joining(self, uint32_t rank, const Event* event) noexcept nogil
    cdef void keep_orphan(self, uint32_t rank, const Event* event, Counts* counts) noexcept nogil
    cdef void unlink_orphan(self, uint32_t orphan) noexcept nogil
    cdef void free_orphan(self, uint32_t orphan) noexcept nogil
    cdef bint cut_orphan(self, uint32_t rank, uint64_t engine, uint32_t slot_key, Counts* counts) noexcept nogil
