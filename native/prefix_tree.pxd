"""Which backend holds which prefix: a radix tree over chained block hashes. The story is in prefix_tree.pyx."""

cimport cython
from libc.stdint cimport uint32_t, uint64_t

from native.block_hash cimport BlockHashes
from native.open_table cimport Table


# A run of block hashes below its parent. Free nodes have no run and are linked by `parent`.
cdef struct Node:
    uint64_t* run
    uint32_t n  # blocks in the run, at least 1
    uint32_t room  # blocks that its memory takes, n unless shrinking it failed
    uint32_t parent
    uint32_t first_child
    uint32_t next_sibling
    uint32_t previous_sibling
    uint32_t first_entry


# That a backend holds the head of a node's run. Free entries have no node and are linked by `next`.
cdef struct Entry:
    uint64_t stamp  # tick of the last insert that passed here
    uint32_t node
    uint32_t slot
    uint32_t held  # leading blocks of the run, at least 1
    uint32_t next  # the node's next entry
    uint32_t older  # in the backend's LRU list
    uint32_t newer


cdef struct BackendEntry:
    uint64_t capacity  # blocks, 0 for no limit of its own
    uint64_t blocks
    uint64_t evicted
    uint32_t oldest
    uint32_t newest
    bint live


# How far a prompt is known: `node` is the deepest node that shares blocks with it, its run begins at prompt block
# `start` and shares `common` blocks, so start + common are known. `missing` nodes on the path lack an entry of the slot.
cdef struct Path:
    uint32_t node
    uint32_t start
    uint32_t common
    uint32_t missing


@cython.final
cdef class PrefixTree:
    cdef Node* nodes
    cdef uint32_t node_room
    cdef uint32_t node_end  # nodes at and past it were never used
    cdef uint32_t node_free
    cdef uint32_t node_live
    cdef Entry* entries
    cdef uint32_t entry_room
    cdef uint32_t entry_end
    cdef uint32_t entry_free
    cdef uint32_t entry_live
    cdef BackendEntry* backends
    cdef uint32_t backend_room
    cdef uint32_t backend_end
    cdef Table table  # (first hash of the run, parent) -> node: the children map of every node
    cdef uint64_t tick
    cdef uint64_t pairs
    cdef uint64_t run_bytes
    cdef uint64_t limit_bytes
    cdef uint64_t memory_evicted
    cdef uint64_t fail_in
    cdef readonly object matched  # array('I') of MAX_BACKENDS, see the .pyi

    # The longest match over all backends; matched[slot] for each slot goes to `matched` (backend_end numbers), if given.
    cdef uint32_t match_blocks(self, const uint64_t* blocks, uint32_t n, uint32_t* matched) noexcept nogil
    cdef uint32_t match_backend(self, uint32_t slot, const uint64_t* blocks, uint32_t n) noexcept nogil

    cdef uint32_t* matched_data(self) except NULL
    cdef BackendEntry* backend_at(self, Py_ssize_t slot) except NULL
    cdef uint64_t bytes_now(self) noexcept nogil
    cdef void* allocate(self, void* old, uint64_t size) noexcept nogil
    cdef int reserve_nodes(self, uint32_t more) except -1
    cdef int reserve_entries(self, uint64_t more) except -1
    cdef int reserve_table(self, uint32_t more) except -1
    cdef uint32_t grown(self, uint32_t live, uint64_t more, uint32_t room, size_t size) except? 0
    cdef uint32_t new_node(self, uint32_t parent, uint64_t* run, uint32_t n) noexcept nogil
    cdef uint32_t new_entry(self, uint32_t node, uint32_t slot, uint32_t held, uint64_t stamp) noexcept nogil
    cdef uint32_t entry_of(self, uint32_t node, uint32_t slot) noexcept nogil
    cdef void link_child(self, uint32_t node) noexcept nogil
    cdef void unlink_child(self, uint32_t node) noexcept nogil
    cdef void link_newest(self, uint32_t entry) noexcept nogil
    cdef void unlink_lru(self, uint32_t entry) noexcept nogil
    cdef void free_node(self, uint32_t node) noexcept nogil
    cdef void shrink_run(self, uint32_t node) noexcept nogil
    cdef Path walk(self, uint32_t slot, const uint64_t* blocks, uint32_t n) noexcept nogil
    cdef uint32_t place(self, uint32_t slot, const uint64_t* blocks, uint32_t n, uint32_t* covered) except? 0xFFFFFFFE
    cdef uint32_t split(self, uint32_t lower, uint32_t at, uint64_t* front) noexcept nogil
    cdef uint64_t touch(self, uint32_t slot, uint32_t node, uint32_t covered) noexcept nogil
    cdef void cut_entry(self, uint32_t entry, uint32_t held) noexcept nogil
    cdef uint64_t drop_below(self, uint32_t slot, uint32_t top) noexcept nogil
    cdef void drop_all(self, uint32_t slot) noexcept nogil
    cdef void evict_to_capacity(self, uint32_t slot) noexcept nogil
    cdef void evict_to_memory_limit(self) noexcept nogil
    cdef uint32_t oldest_entry(self) noexcept nogil
    cdef bint sparse(self) noexcept nogil
    cdef void compact(self) noexcept nogil
    cdef void compact_nodes(self) noexcept nogil
    cdef void compact_entries(self) noexcept nogil
    cdef void rebuild_table(self) noexcept nogil
