"""Which backend holds which prefix: a radix tree over chained block hashes, one for all models and backends.

Shape. A node is a run of blocks that nothing has yet had a reason to part; its children continue it. One
open-addressing table, keyed by (first hash of the run, parent), is the children map of every node, so a walk costs one
probe a node and one comparison of memory a run. Nodes and entries live in growable arrays and name each other by index.

Holders. A node lists an entry for each backend that holds any of it: `held` leading blocks of the run, used last at
tick `stamp`. All blocks of one entry were used last by one insert: an insert that ends inside what its backend holds
splits the node there. So the entries of a backend, in the order of its LRU list, are its blocks in the order of their
last use, and the tree forgets exactly the blocks that an LRU over single blocks would, a prompt's tail before its head.

Invariants (check() walks them all):
 1. A backend that holds anything of a node holds all of the parent's run.
 2. Each node has a holder, and its run ends where its longest holder's `held` does.
 3. In a backend's LRU list an entry stands before (is older than) the entry of its node's parent; stamps only grow.
    The old end is therefore always a tail: it can be cut without looking below.
 4. No two children of a node begin with the same hash; a run is never empty.
 5. The counters (pairs, blocks of a backend, bytes of runs) are what a walk finds.

Memory. Room is made before anything changes: an allocation that fails leaves the tree as it was, with MemoryError. The
arrays grow by a quarter, less when the limit is near; when half of one stands empty while the limit presses, it is
compacted. The limit is enforced at the end of each call that can grow the tree; within an insert, memory may stand above
it by what that one prompt brings, 8 bytes a block.
"""

cimport cython
from cpython cimport array
from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport free, realloc
from libc.string cimport memcpy, memmove, memset

from native.block_hash cimport BlockHashes
from native.open_table cimport (
    ABSENT,
    Table,
    TableSlot,
    table_adopt,
    table_clear,
    table_erase,
    table_find,
    table_put,
    table_room,
)

import array as _array

from native.open_table import new_secret

cdef enum:
    # All tables at their smallest and MAX_BACKENDS backends stay below MIN_MEMORY_LIMIT_BYTES.
    BACKENDS_AT_MOST = 1024
    MEMORY_LIMIT_AT_LEAST = 65536
    SMALLEST_ROOM = 16
    SMALLEST_TABLE = 32
    # Blocks cut at once under memory pressure: few enough to evict little too much, enough not to loop for long.
    MEMORY_STRIDE = 64
    # Longer prompts are indexed up to here (2 G blocks), so that a position fits 31 bits.
    BLOCKS_AT_MOST = 0x7FFFFFFF

MAX_BACKENDS = BACKENDS_AT_MOST
MIN_MEMORY_LIMIT_BYTES = MEMORY_LIMIT_AT_LEAST


# What glibc takes from the heap for an allocation: an 8-byte header, rounded up to 16, 32 at least.
cdef inline uint64_t heap_bytes(uint64_t size) noexcept nogil:
    cdef uint64_t chunk = (size + 23) & ~(<uint64_t>15)
    return chunk if chunk > 32 else 32


cdef inline uint64_t run_heap_bytes(uint32_t room) noexcept nogil:
    return heap_bytes(<uint64_t>room * sizeof(uint64_t))


cdef inline uint32_t common_length(const uint64_t* a, const uint64_t* b, uint32_t n) noexcept nogil:
    # Four at a time: twice as fast as one, as the compiler vectorises no loop that may end early.
    cdef uint32_t i = 0
    while i + 4 <= n:
        if ((a[i] ^ b[i]) | (a[i + 1] ^ b[i + 1]) | (a[i + 2] ^ b[i + 2]) | (a[i + 3] ^ b[i + 3])) != 0:
            break
        i += 4
    while i < n and a[i] == b[i]:
        i += 1
    return i


# The smallest capacity whose bound leaves a fourth of slack over `used`.
cdef inline size_t fitting_table(size_t used) noexcept nogil:
    cdef size_t capacity = SMALLEST_TABLE
    while table_room(capacity) < used + used // 4:
        capacity *= 2
    return capacity


cdef inline uint32_t clipped(Py_ssize_t n, uint64_t most) noexcept nogil:
    if most == 0 or most > BLOCKS_AT_MOST:
        most = BLOCKS_AT_MOST
    return <uint32_t>n if <uint64_t>n < most else <uint32_t>most


@cython.final
cdef class PrefixTree:
    # --- life ---

    def __cinit__(self, memory_limit_bytes):
        if memory_limit_bytes < MEMORY_LIMIT_AT_LEAST:
            raise ValueError(f"memory_limit_bytes must be at least {MEMORY_LIMIT_AT_LEAST}, not {memory_limit_bytes}")
        self.limit_bytes = memory_limit_bytes
        self.node_free = ABSENT
        self.entry_free = ABSENT
        self.matched = _array.array("I", bytes(4 * BACKENDS_AT_MOST))
        self.table.secret[0], self.table.secret[1] = new_secret()
        self.reserve_nodes(1)
        self.reserve_entries(1)
        self.reserve_table(1)

    def __dealloc__(self):
        cdef uint32_t i
        for i in range(self.node_end):
            free(self.nodes[i].run)
        free(self.nodes)
        free(self.entries)
        free(self.backends)
        free(self.table.slots)

    # --- backends ---

    def add_backend(self):
        cdef uint32_t slot = 0
        cdef uint32_t room
        cdef BackendEntry* grown
        while slot < self.backend_end and self.backends[slot].live:
            slot += 1
        if slot == self.backend_room:
            if slot >= BACKENDS_AT_MOST:
                raise ValueError(f"at most {BACKENDS_AT_MOST} backends")
            room = max(8, 2 * self.backend_room)
            grown = <BackendEntry*>self.allocate(self.backends, room * sizeof(BackendEntry))
            if grown == NULL:
                raise MemoryError
            self.backends = grown
            self.backend_room = room
        if slot == self.backend_end:
            self.backend_end += 1
        memset(&self.backends[slot], 0, sizeof(BackendEntry))
        self.backends[slot].oldest = ABSENT
        self.backends[slot].newest = ABSENT
        self.backends[slot].live = True
        self.evict_to_memory_limit()
        return slot

    def remove_backend(self, Py_ssize_t slot):
        self.backend_at(slot)
        cdef uint32_t* matched = self.matched_data()
        self.drop_all(<uint32_t>slot)
        self.backends[slot].live = False
        matched[slot] = 0
        while self.backend_end > 0 and not self.backends[self.backend_end - 1].live:
            self.backend_end -= 1

    def clear_backend(self, Py_ssize_t slot):
        self.backend_at(slot)
        self.drop_all(<uint32_t>slot)

    def set_capacity(self, Py_ssize_t slot, Py_ssize_t blocks):
        cdef BackendEntry* backend = self.backend_at(slot)
        if blocks < 0:
            raise ValueError(f"a capacity is 0 or more blocks, not {blocks}")
        backend.capacity = <uint64_t>blocks
        self.evict_to_capacity(<uint32_t>slot)

    cdef BackendEntry* backend_at(self, Py_ssize_t slot) except NULL:
        if slot < 0 or slot >= <Py_ssize_t>self.backend_end or not self.backends[slot].live:
            raise ValueError(f"no backend has slot {slot}")
        return &self.backends[slot]

    cdef uint32_t* matched_data(self) except NULL:
        cdef array.array matched = <array.array>self.matched
        if len(matched) < BACKENDS_AT_MOST:
            raise ValueError("`matched` belongs to the tree, and was shortened")
        return matched.data.as_uints

    # --- what routing asks and tells ---

    def match(self, BlockHashes blocks not None):
        return self.match_blocks(blocks.data, clipped(blocks.n, 0), self.matched_data())

    def match_one(self, Py_ssize_t slot, BlockHashes blocks not None):
        self.backend_at(slot)
        return self.match_backend(<uint32_t>slot, blocks.data, clipped(blocks.n, 0))

    def insert(self, Py_ssize_t slot, BlockHashes blocks not None):
        cdef BackendEntry* backend = self.backend_at(slot)
        cdef uint32_t n = clipped(blocks.n, backend.capacity)
        cdef uint32_t covered = 0
        cdef uint32_t node
        cdef uint64_t fresh
        if n == 0:
            return 0
        node = self.place(<uint32_t>slot, blocks.data, n, &covered)
        self.tick += 1
        fresh = self.touch(<uint32_t>slot, node, covered)
        self.evict_to_capacity(<uint32_t>slot)
        self.evict_to_memory_limit()
        return fresh

    def forget_after(self, Py_ssize_t slot, BlockHashes blocks not None, Py_ssize_t keep):
        self.backend_at(slot)
        if keep < 0:
            raise ValueError(f"keep is 0 or more blocks, not {keep}")
        cdef uint32_t n = clipped(blocks.n, 0)
        cdef uint32_t position = 0
        cdef uint32_t node = ABSENT
        cdef uint32_t entry, held, covered
        cdef uint64_t dropped
        while position < n:
            node = table_find(&self.table, blocks.data[position], node)
            if node == ABSENT:
                return 0
            entry = self.entry_of(node, <uint32_t>slot)
            if entry == ABSENT:
                return 0
            held = self.entries[entry].held
            covered = common_length(self.nodes[node].run, blocks.data + position, min(held, n - position))
            if <Py_ssize_t>(position + covered) > keep:
                dropped = self.drop_below(<uint32_t>slot, node) + held - <uint32_t>(keep - position)
                self.cut_entry(entry, <uint32_t>(keep - position))
                return dropped
            if covered < self.nodes[node].n:
                return 0
            position += covered
        return 0

    # --- figures ---

    def __len__(self):
        return self.pairs

    def blocks_of(self, Py_ssize_t slot):
        return self.backend_at(slot).blocks

    def evicted(self, Py_ssize_t slot):
        return self.backend_at(slot).evicted

    @property
    def evicted_by_memory(self):
        return self.memory_evicted

    @property
    def node_count(self):
        return self.node_live

    @property
    def entry_count(self):
        return self.entry_live

    @property
    def memory_limit_bytes(self):
        return self.limit_bytes

    def memory_bytes(self):
        return self.bytes_now()

    cdef uint64_t bytes_now(self) noexcept nogil:
        return (
            sizeof(PrefixTree)
            + heap_bytes(BACKENDS_AT_MOST * sizeof(uint32_t))
            + heap_bytes(self.node_room * sizeof(Node))
            + heap_bytes(self.entry_room * sizeof(Entry))
            + heap_bytes(self.backend_room * sizeof(BackendEntry))
            + heap_bytes(self.table.capacity * sizeof(TableSlot))
            + self.run_bytes
        )

    # --- matching ---

    cdef uint32_t match_blocks(self, const uint64_t* blocks, uint32_t n, uint32_t* matched) noexcept nogil:
        cdef uint32_t position = 0
        cdef uint32_t node = ABSENT
        cdef uint32_t common, entry
        cdef Node* known
        if matched != NULL:
            memset(matched, 0, self.backend_end * sizeof(uint32_t))
        while position < n:
            node = table_find(&self.table, blocks[position], node)
            if node == ABSENT:
                break
            known = &self.nodes[node]
            common = common_length(known.run, blocks + position, min(known.n, n - position))
            if matched != NULL:
                # Whoever holds this node holds all before it (invariant 1): the deepest entry is the whole answer.
                entry = known.first_entry
                while entry != ABSENT:
                    matched[self.entries[entry].slot] = position + min(self.entries[entry].held, common)
                    entry = self.entries[entry].next
            position += common
            if common < known.n:
                break
        return position

    cdef uint32_t match_backend(self, uint32_t slot, const uint64_t* blocks, uint32_t n) noexcept nogil:
        cdef uint32_t position = 0
        cdef uint32_t node = ABSENT
        cdef uint32_t common, entry
        while position < n:
            node = table_find(&self.table, blocks[position], node)
            if node == ABSENT:
                break
            entry = self.entry_of(node, slot)
            if entry == ABSENT:
                break
            common = min(self.entries[entry].held, n - position)
            common = common_length(self.nodes[node].run, blocks + position, common)
            position += common
            if common < self.nodes[node].n:
                break
        return position

    # --- growing ---

    cdef Path walk(self, uint32_t slot, const uint64_t* blocks, uint32_t n) noexcept nogil:
        cdef Path path
        cdef uint32_t position = 0
        cdef uint32_t child
        path.node = ABSENT
        path.start = 0
        path.common = 0
        path.missing = 0
        while position < n:
            child = table_find(&self.table, blocks[position], path.node)
            if child == ABSENT:
                break
            path.node = child
            path.start = position
            path.common = common_length(self.nodes[child].run, blocks + position, min(self.nodes[child].n, n - position))
            if path.missing > 0 or self.entry_of(child, slot) == ABSENT:
                path.missing += 1
            position += path.common
            if path.common < self.nodes[child].n:
                break
        return path

    cdef uint32_t place(self, uint32_t slot, const uint64_t* blocks, uint32_t n, uint32_t* covered) except? 0xFFFFFFFE:
        # Sees to it that nodes for blocks[0:n] are there, and that touch() has the entries it needs. Returns the deepest
        # node and how much of its run the prompt covers. The new node, if any, has no holder yet: touch() follows.
        cdef Path path = self.walk(slot, blocks, n)
        cdef uint32_t node = path.node
        cdef uint32_t known = path.start + path.common
        cdef uint32_t rest = n - known
        cdef uint32_t entry
        cdef uint64_t holders = 0  # of more than the part that a split puts in front
        cdef bint splits = False
        cdef bint extends = False
        cdef uint64_t* front = NULL
        cdef uint64_t* run = NULL

        if node != ABSENT:
            if path.common < self.nodes[node].n:
                entry = self.entry_of(node, slot)
                splits = rest > 0 or (entry != ABSENT and self.entries[entry].held > path.common)
            else:
                extends = rest > 0 and self.nodes[node].first_child == ABSENT
        if splits:
            entry = self.nodes[node].first_entry
            while entry != ABSENT:
                holders += self.entries[entry].held > path.common
                entry = self.entries[entry].next

        # Everything that can fail, before anything changes.
        self.reserve_nodes(2)
        self.reserve_table(2)
        self.reserve_entries(holders + path.missing + 1)
        if splits:
            front = <uint64_t*>self.allocate(NULL, <uint64_t>path.common * sizeof(uint64_t))
            if front == NULL:
                raise MemoryError
        if rest > 0:
            run = <uint64_t*>self.allocate(
                self.nodes[node].run if extends else NULL,
                (<uint64_t>rest + (path.common if extends else 0)) * sizeof(uint64_t),
            )
            if run == NULL:
                free(front)
                raise MemoryError

        if splits:
            node = self.split(node, path.common, front)
        covered[0] = path.common
        if extends:
            self.run_bytes -= run_heap_bytes(self.nodes[node].room)
            memcpy(run + path.common, blocks + known, <size_t>rest * sizeof(uint64_t))
            self.nodes[node].run = run
            self.nodes[node].n += rest
            self.nodes[node].room = self.nodes[node].n
            self.run_bytes += run_heap_bytes(self.nodes[node].room)
            covered[0] = self.nodes[node].n
        elif rest > 0:
            memcpy(run, blocks + known, <size_t>rest * sizeof(uint64_t))
            node = self.new_node(node, run, rest)
            self.link_child(node)
            table_put(&self.table, run[0], self.nodes[node].parent, node)
            covered[0] = rest
        return node

    cdef uint32_t split(self, uint32_t lower, uint32_t at, uint64_t* front) noexcept nogil:
        # The lower part keeps its index, so that its children need not change. `front` has room for `at` blocks.
        cdef Node* low = &self.nodes[lower]
        cdef uint32_t upper, entry, head, following
        memcpy(front, low.run, <size_t>at * sizeof(uint64_t))
        upper = self.new_node(low.parent, front, at)
        table_put(&self.table, front[0], low.parent, upper)
        self.unlink_child(lower)
        self.link_child(upper)

        memmove(low.run, low.run + at, <size_t>(low.n - at) * sizeof(uint64_t))
        low.n -= at
        self.shrink_run(lower)
        low.parent = upper
        self.link_child(lower)
        table_put(&self.table, low.run[0], upper, lower)

        entry = low.first_entry
        low.first_entry = ABSENT
        while entry != ABSENT:
            following = self.entries[entry].next
            if self.entries[entry].held > at:
                head = self.new_entry(upper, self.entries[entry].slot, at, self.entries[entry].stamp)
                self.entries[head].older = entry
                self.entries[head].newer = self.entries[entry].newer
                if self.entries[head].newer == ABSENT:
                    self.backends[self.entries[head].slot].newest = head
                else:
                    self.entries[self.entries[head].newer].older = head
                self.entries[entry].newer = head
                self.entries[entry].held -= at
                self.entries[entry].next = low.first_entry
                low.first_entry = entry
            else:
                self.entries[entry].node = upper
                self.entries[entry].next = self.nodes[upper].first_entry
                self.nodes[upper].first_entry = entry
            entry = following
        return upper

    cdef uint64_t touch(self, uint32_t slot, uint32_t node, uint32_t covered) noexcept nogil:
        # Moves the path that ends `covered` blocks into `node` to the recent end, leaf first and root last, and makes
        # the backend a holder of all of it. Returns how many blocks it did not hold. Needs room for the new entries.
        cdef uint64_t fresh = 0
        cdef uint32_t entry
        while node != ABSENT:
            entry = self.entry_of(node, slot)
            if entry == ABSENT:
                entry = self.new_entry(node, slot, covered, self.tick)
                fresh += covered
            else:
                self.unlink_lru(entry)
                if covered > self.entries[entry].held:
                    fresh += covered - self.entries[entry].held
                    self.entries[entry].held = covered
                self.entries[entry].stamp = self.tick
            self.link_newest(entry)
            node = self.nodes[node].parent
            if node != ABSENT:
                covered = self.nodes[node].n
        self.backends[slot].blocks += fresh
        self.pairs += fresh
        return fresh

    # --- shrinking ---

    cdef void cut_entry(self, uint32_t entry, uint32_t held) noexcept nogil:
        # Leaves the backend `held` blocks of the run, fewer than before; its slot has no entry below.
        cdef Entry* cut = &self.entries[entry]
        cdef Node* node = &self.nodes[cut.node]
        cdef uint32_t index = cut.node
        cdef uint32_t before = cut.held
        cdef uint32_t longest = 0
        cdef uint32_t other
        cdef uint32_t* link
        self.backends[cut.slot].blocks -= before - held
        self.pairs -= before - held
        cut.held = held
        if held == 0:
            self.unlink_lru(entry)
            link = &node.first_entry
            while link[0] != entry:
                link = &self.entries[link[0]].next
            link[0] = cut.next
            cut.node = ABSENT
            cut.next = self.entry_free
            self.entry_free = entry
            self.entry_live -= 1
        if before < node.n or node.first_child != ABSENT:
            return
        other = node.first_entry
        while other != ABSENT:
            longest = max(longest, self.entries[other].held)
            other = self.entries[other].next
        if longest == 0:
            self.free_node(index)
        elif longest < node.n:
            node.n = longest
            self.shrink_run(index)

    cdef uint64_t drop_below(self, uint32_t slot, uint32_t top) noexcept nogil:
        # Drops what the backend holds below `top`, children before parents, in one pass over the subtree it holds and
        # the siblings beside it. `top` itself stays: its backend still has an entry there.
        cdef uint64_t dropped = 0
        cdef uint32_t node = top
        cdef uint32_t child = self.nodes[top].first_child
        cdef uint32_t entry, parent
        while True:
            while child != ABSENT and self.entry_of(child, slot) == ABSENT:
                child = self.nodes[child].next_sibling
            if child != ABSENT:
                node = child
                child = self.nodes[node].first_child
                continue
            if node == top:
                return dropped
            parent = self.nodes[node].parent
            child = self.nodes[node].next_sibling
            entry = self.entry_of(node, slot)
            dropped += self.entries[entry].held
            self.cut_entry(entry, 0)
            node = parent

    cdef void drop_all(self, uint32_t slot) noexcept nogil:
        while self.backends[slot].oldest != ABSENT:
            self.cut_entry(self.backends[slot].oldest, 0)
        if self.sparse():
            self.compact()

    cdef void evict_to_capacity(self, uint32_t slot) noexcept nogil:
        cdef BackendEntry* backend = &self.backends[slot]
        cdef uint64_t excess
        cdef uint32_t held
        while backend.capacity > 0 and backend.blocks > backend.capacity:
            excess = backend.blocks - backend.capacity
            held = self.entries[backend.oldest].held
            if excess > held:
                excess = held
            self.cut_entry(backend.oldest, held - <uint32_t>excess)
            backend.evicted += excess

    cdef void evict_to_memory_limit(self) noexcept nogil:
        # The table counts too: it is over its bound where it could not double within the limit.
        cdef uint64_t now, cut
        cdef uint32_t entry, held
        while True:
            now = self.bytes_now()
            if now <= self.limit_bytes and self.table.used <= table_room(self.table.capacity):
                return
            if now > self.limit_bytes and self.sparse():
                self.compact()
                if self.bytes_now() < now:
                    continue
            entry = self.oldest_entry()
            if entry == ABSENT:
                return
            held = self.entries[entry].held
            cut = (now - self.limit_bytes) // sizeof(uint64_t) + 1 if now > self.limit_bytes else held
            cut = min(<uint64_t>held, max(cut, <uint64_t>MEMORY_STRIDE))
            self.backends[self.entries[entry].slot].evicted += cut
            self.memory_evicted += cut
            self.cut_entry(entry, held - <uint32_t>cut)

    cdef uint32_t oldest_entry(self) noexcept nogil:
        cdef uint32_t oldest = ABSENT
        cdef uint32_t slot, entry
        for slot in range(self.backend_end):
            entry = self.backends[slot].oldest if self.backends[slot].live else ABSENT
            if entry != ABSENT and (oldest == ABSENT or self.entries[entry].stamp < self.entries[oldest].stamp):
                oldest = entry
        return oldest

    # --- nodes, entries and their links ---

    cdef uint32_t new_node(self, uint32_t parent, uint64_t* run, uint32_t n) noexcept nogil:
        cdef uint32_t index = self.node_free
        if index != ABSENT:
            self.node_free = self.nodes[index].parent
        else:
            index = self.node_end
            self.node_end += 1
        cdef Node* node = &self.nodes[index]
        node.run = run
        node.n = n
        node.room = n
        node.parent = parent
        node.first_child = ABSENT
        node.next_sibling = ABSENT
        node.previous_sibling = ABSENT
        node.first_entry = ABSENT
        self.node_live += 1
        self.run_bytes += run_heap_bytes(n)
        return index

    cdef void free_node(self, uint32_t index) noexcept nogil:
        cdef Node* node = &self.nodes[index]
        table_erase(&self.table, node.run[0], node.parent)
        self.unlink_child(index)
        self.run_bytes -= run_heap_bytes(node.room)
        free(node.run)
        node.run = NULL
        node.parent = self.node_free
        self.node_free = index
        self.node_live -= 1

    cdef uint32_t new_entry(self, uint32_t node, uint32_t slot, uint32_t held, uint64_t stamp) noexcept nogil:
        # Into the node's list; the place in the LRU list is the caller's business.
        cdef uint32_t index = self.entry_free
        if index != ABSENT:
            self.entry_free = self.entries[index].next
        else:
            index = self.entry_end
            self.entry_end += 1
        cdef Entry* entry = &self.entries[index]
        entry.stamp = stamp
        entry.node = node
        entry.slot = slot
        entry.held = held
        entry.older = ABSENT
        entry.newer = ABSENT
        entry.next = self.nodes[node].first_entry
        self.nodes[node].first_entry = index
        self.entry_live += 1
        return index

    cdef uint32_t entry_of(self, uint32_t node, uint32_t slot) noexcept nogil:
        cdef uint32_t entry = self.nodes[node].first_entry
        while entry != ABSENT and self.entries[entry].slot != slot:
            entry = self.entries[entry].next
        return entry

    cdef void link_child(self, uint32_t index) noexcept nogil:
        # Roots have no parent, and so no list: nothing ever walks them.
        cdef Node* node = &self.nodes[index]
        node.previous_sibling = ABSENT
        node.next_sibling = ABSENT
        if node.parent == ABSENT:
            return
        node.next_sibling = self.nodes[node.parent].first_child
        if node.next_sibling != ABSENT:
            self.nodes[node.next_sibling].previous_sibling = index
        self.nodes[node.parent].first_child = index

    cdef void unlink_child(self, uint32_t index) noexcept nogil:
        cdef Node* node = &self.nodes[index]
        if node.next_sibling != ABSENT:
            self.nodes[node.next_sibling].previous_sibling = node.previous_sibling
        if node.previous_sibling != ABSENT:
            self.nodes[node.previous_sibling].next_sibling = node.next_sibling
        elif node.parent != ABSENT:
            self.nodes[node.parent].first_child = node.next_sibling

    cdef void link_newest(self, uint32_t index) noexcept nogil:
        cdef Entry* entry = &self.entries[index]
        cdef BackendEntry* backend = &self.backends[entry.slot]
        entry.newer = ABSENT
        entry.older = backend.newest
        if backend.newest != ABSENT:
            self.entries[backend.newest].newer = index
        else:
            backend.oldest = index
        backend.newest = index

    cdef void unlink_lru(self, uint32_t index) noexcept nogil:
        cdef Entry* entry = &self.entries[index]
        cdef BackendEntry* backend = &self.backends[entry.slot]
        if entry.newer != ABSENT:
            self.entries[entry.newer].older = entry.older
        else:
            backend.newest = entry.older
        if entry.older != ABSENT:
            self.entries[entry.older].newer = entry.newer
        else:
            backend.oldest = entry.newer

    # --- memory ---

    cdef void* allocate(self, void* old, uint64_t size) noexcept nogil:
        # The one way to the heap, so that a test can make each allocation fail in turn.
        if self.fail_in > 0:
            self.fail_in -= 1
            if self.fail_in == 0:
                return NULL
        return realloc(old, size)

    cdef void shrink_run(self, uint32_t index) noexcept nogil:
        cdef Node* node = &self.nodes[index]
        cdef uint64_t* run = <uint64_t*>self.allocate(node.run, <uint64_t>node.n * sizeof(uint64_t))
        if run == NULL:
            return  # the old memory is still good, and counted by `room`
        self.run_bytes -= run_heap_bytes(node.room)
        node.run = run
        node.room = node.n
        self.run_bytes += run_heap_bytes(node.room)

    cdef uint32_t grown(self, uint32_t live, uint64_t more, uint32_t room, size_t size) except? 0:
        # The room to have for `more` next to `live`: a quarter more than now, so that growing is cheap in sum; towards
        # the limit at most half of what is left, so that the array does not drive out what it was to describe.
        cdef uint64_t need = live + more
        cdef uint64_t now = self.bytes_now()
        cdef uint64_t left = self.limit_bytes - now if self.limit_bytes > now else 0
        cdef uint64_t step = max(room // 4, <uint32_t>SMALLEST_ROOM)
        cdef uint64_t target
        if step > left // 2 // size:
            step = left // 2 // size
        target = max(max(room + step, need), <uint64_t>SMALLEST_ROOM)
        if target >= ABSENT:
            raise MemoryError("the index has as many nodes as 32 bits can count")
        return <uint32_t>target

    cdef int reserve_nodes(self, uint32_t more) except -1:
        cdef uint32_t room
        cdef Node* nodes
        if self.node_room - self.node_live >= more:
            return 0
        room = self.grown(self.node_live, more, self.node_room, sizeof(Node))
        nodes = <Node*>self.allocate(self.nodes, room * sizeof(Node))
        if nodes == NULL:
            raise MemoryError
        self.nodes = nodes
        self.node_room = room
        return 0

    cdef int reserve_entries(self, uint64_t more) except -1:
        cdef uint32_t room
        cdef Entry* entries
        if self.entry_room - self.entry_live >= more:
            return 0
        room = self.grown(self.entry_live, more, self.entry_room, sizeof(Entry))
        entries = <Entry*>self.allocate(self.entries, room * sizeof(Entry))
        if entries == NULL:
            raise MemoryError
        self.entries = entries
        self.entry_room = room
        return 0

    cdef int reserve_table(self, uint32_t more) except -1:
        # Where doubling would break the limit the table stays as it is: the quarter that its bound keeps free takes
        # the few keys of one insert, and evict_to_memory_limit() brings it back under the bound.
        cdef size_t capacity = max(<size_t>SMALLEST_TABLE, self.table.capacity * 2)
        cdef TableSlot* slots
        if self.table.capacity > 0:
            if self.table.used + more <= table_room(self.table.capacity):
                return 0
            if self.bytes_now() + self.table.capacity * sizeof(TableSlot) > self.limit_bytes:
                return 0
        slots = <TableSlot*>self.allocate(NULL, capacity * sizeof(TableSlot))
        if slots == NULL:
            raise MemoryError
        free(table_adopt(&self.table, slots, capacity))
        return 0

    cdef bint sparse(self) noexcept nogil:
        # Compacting leaves at most 5/4 of what lives, so that it cannot come again before that has changed by much.
        return (
            (self.node_room > SMALLEST_ROOM and self.node_live < self.node_room // 2)
            or (self.entry_room > SMALLEST_ROOM and self.entry_live < self.entry_room // 2)
            or fitting_table(self.table.used) < self.table.capacity
        )

    cdef void compact(self) noexcept nogil:
        self.compact_nodes()
        self.compact_entries()
        self.rebuild_table()

    cdef void compact_nodes(self) noexcept nogil:
        # Moves the nodes at the end into the holes before them. A place left behind says in `room` where its node went.
        cdef uint32_t hole = 0
        cdef uint32_t i = self.node_end
        cdef uint32_t live = self.node_live
        cdef uint32_t room
        cdef Node* node
        cdef Node* nodes
        while i > live:
            i -= 1
            if self.nodes[i].run == NULL:
                continue
            while self.nodes[hole].run != NULL:
                hole += 1
            self.nodes[hole] = self.nodes[i]
            self.nodes[i].run = NULL
            self.nodes[i].room = hole
        for i in range(live):
            node = &self.nodes[i]
            if node.parent != ABSENT and node.parent >= live:
                node.parent = self.nodes[node.parent].room
            if node.first_child != ABSENT and node.first_child >= live:
                node.first_child = self.nodes[node.first_child].room
            if node.next_sibling != ABSENT and node.next_sibling >= live:
                node.next_sibling = self.nodes[node.next_sibling].room
            if node.previous_sibling != ABSENT and node.previous_sibling >= live:
                node.previous_sibling = self.nodes[node.previous_sibling].room
        for i in range(self.entry_end):
            if self.entries[i].node != ABSENT and self.entries[i].node >= live:
                self.entries[i].node = self.nodes[self.entries[i].node].room
        self.node_free = ABSENT
        self.node_end = live
        room = max(<uint32_t>SMALLEST_ROOM, live + live // 4)
        if room < self.node_room:
            nodes = <Node*>self.allocate(self.nodes, room * sizeof(Node))
            if nodes != NULL:
                self.nodes = nodes
                self.node_room = room

    cdef void compact_entries(self) noexcept nogil:
        # As compact_nodes; a place left behind says in `held` where its entry went.
        cdef uint32_t hole = 0
        cdef uint32_t i = self.entry_end
        cdef uint32_t live = self.entry_live
        cdef uint32_t room
        cdef Entry* entry
        cdef Entry* entries
        while i > live:
            i -= 1
            if self.entries[i].node == ABSENT:
                continue
            while self.entries[hole].node != ABSENT:
                hole += 1
            self.entries[hole] = self.entries[i]
            self.entries[i].node = ABSENT
            self.entries[i].held = hole
        for i in range(live):
            entry = &self.entries[i]
            if entry.next != ABSENT and entry.next >= live:
                entry.next = self.entries[entry.next].held
            if entry.older != ABSENT and entry.older >= live:
                entry.older = self.entries[entry.older].held
            if entry.newer != ABSENT and entry.newer >= live:
                entry.newer = self.entries[entry.newer].held
        for i in range(self.node_end):
            if self.nodes[i].run != NULL and self.nodes[i].first_entry >= live:
                self.nodes[i].first_entry = self.entries[self.nodes[i].first_entry].held
        for i in range(self.backend_end):
            if self.backends[i].oldest != ABSENT and self.backends[i].oldest >= live:
                self.backends[i].oldest = self.entries[self.backends[i].oldest].held
            if self.backends[i].newest != ABSENT and self.backends[i].newest >= live:
                self.backends[i].newest = self.entries[self.backends[i].newest].held
        self.entry_free = ABSENT
        self.entry_end = live
        room = max(<uint32_t>SMALLEST_ROOM, live + live // 4)
        if room < self.entry_room:
            entries = <Entry*>self.allocate(self.entries, room * sizeof(Entry))
            if entries != NULL:
                self.entries = entries
                self.entry_room = room

    cdef void rebuild_table(self) noexcept nogil:
        # Moved nodes are other owners and other values: all keys are put anew, into less memory where that fits.
        cdef size_t capacity = fitting_table(self.table.used)
        cdef TableSlot* slots = NULL
        cdef uint32_t i
        if capacity < self.table.capacity:
            slots = <TableSlot*>self.allocate(NULL, capacity * sizeof(TableSlot))
        if slots != NULL:
            free(self.table.slots)
            self.table.slots = slots
            self.table.capacity = capacity
        table_clear(&self.table)
        for i in range(self.node_end):
            table_put(&self.table, self.nodes[i].run[0], self.nodes[i].parent, i)

    # --- for tests ---

    def _fail_allocation(self, uint64_t after):
        self.fail_in = after

    def holdings(self):
        cdef uint32_t slot, entry, node, i
        result = {}
        for slot in range(self.backend_end):
            if not self.backends[slot].live:
                continue
            blocks = result[slot] = []
            entry = self.backends[slot].oldest
            while entry != ABSENT:
                node = self.entries[entry].node
                path = []
                while node != ABSENT:
                    path.append(node)
                    node = self.nodes[node].parent
                depth, chain = 0, 0
                for node in reversed(path):
                    chains = []
                    for i in range(self.nodes[node].n):
                        chain = hash((chain, self.nodes[node].run[i]))
                        chains.append(chain)
                    depth += len(chains)
                depth -= len(chains)
                for i in range(self.entries[entry].held, 0, -1):
                    blocks.append((depth + i, chains[i - 1], self.entries[entry].stamp))
                entry = self.entries[entry].newer
        return result

    def check(self):
        live_nodes = self._check_nodes()
        self._check_entries(live_nodes)
        self._check_lru()
        require(
            self.bytes_now() <= self.limit_bytes, f"{self.bytes_now()} bytes are over the limit of {self.limit_bytes}"
        )

    def _check_nodes(self):
        cdef uint32_t i, child, before
        cdef uint64_t run_bytes = 0
        free_nodes = set()
        i = self.node_free
        while i != ABSENT:
            require(i < self.node_end and i not in free_nodes, f"node {i} is wrongly in the free list")
            require(self.nodes[i].run == NULL, f"node {i} is free and has a run")
            free_nodes.add(i)
            i = self.nodes[i].parent
        live = [i for i in range(self.node_end) if i not in free_nodes]
        require(len(live) == self.node_live, f"{len(live)} nodes live, {self.node_live} are counted")
        require(self.node_end <= self.node_room, "more nodes than room")
        listed = 0
        for i in live:
            node = f"node {i}"
            require(self.nodes[i].run != NULL, f"{node} is neither free nor has it a run")
            require(1 <= self.nodes[i].n <= self.nodes[i].room, f"{node}: {self.nodes[i].n} blocks do not fit")
            run_bytes += run_heap_bytes(self.nodes[i].room)
            parent = self.nodes[i].parent
            require(parent == ABSENT or parent < self.node_end, f"{node}: parent {parent}")
            require(parent not in free_nodes, f"{node}: parent {parent} is free")
            found = table_find(&self.table, self.nodes[i].run[0], self.nodes[i].parent)
            require(found == i, f"{node}: the table names {found} under its first hash and parent")
            if parent == ABSENT:
                require(
                    self.nodes[i].next_sibling == ABSENT and self.nodes[i].previous_sibling == ABSENT,
                    f"{node} is a root with siblings",
                )
            depth = 0
            up = parent
            while up != ABSENT:
                depth += 1
                require(depth <= len(live), f"{node} is its own ancestor")
                up = self.nodes[up].parent
            before = ABSENT
            child = self.nodes[i].first_child
            while child != ABSENT:
                require(child < self.node_end and child not in free_nodes, f"{node}: child {child} does not live")
                require(self.nodes[child].parent == i, f"{node}: child {child} has another parent")
                require(self.nodes[child].previous_sibling == before, f"{node}: child {child} is wrongly linked")
                listed += 1
                require(listed <= len(live), f"{node}: its children run in a circle")
                before = child
                child = self.nodes[child].next_sibling
        roots = sum([1 for i in live if self.nodes[i].parent == ABSENT])
        require(listed + roots == len(live), f"{listed} children and {roots} roots do not make {len(live)} nodes")
        require(run_bytes == self.run_bytes, f"runs take {run_bytes} bytes, {self.run_bytes} are counted")
        require(self.table.used == <size_t>len(live), f"the table has {self.table.used} keys for {len(live)} nodes")
        require(self.table.used <= table_room(self.table.capacity), "the table is over its bound")
        return live

    def _check_entries(self, live_nodes):
        cdef uint32_t i, node, entry
        free_entries = set()
        i = self.entry_free
        while i != ABSENT:
            require(i < self.entry_end and i not in free_entries, f"entry {i} is wrongly in the free list")
            require(self.entries[i].node == ABSENT, f"entry {i} is free and has a node")
            free_entries.add(i)
            i = self.entries[i].next
        living = self.entry_end - len(free_entries)
        require(living == self.entry_live, f"{living} entries live, {self.entry_live} are counted")
        require(self.entry_end <= self.entry_room, "more entries than room")
        holders = {}
        for node in live_nodes:
            held = {}
            entry = self.nodes[node].first_entry
            while entry != ABSENT:
                require(entry < self.entry_end and entry not in free_entries, f"node {node}: entry {entry} is free")
                require(self.entries[entry].node == node, f"entry {entry} is listed by node {node}, not its own")
                slot = self.entries[entry].slot
                require(slot < self.backend_end and self.backends[slot].live, f"entry {entry}: no backend {slot}")
                require(slot not in held, f"node {node} lists backend {slot} twice")
                held[slot] = self.entries[entry].held
                require(1 <= held[slot] <= self.nodes[node].n, f"entry {entry} holds {held[slot]} blocks")
                entry = self.entries[entry].next
            require(held, f"node {node} has no holder")
            require(max(held.values()) == self.nodes[node].n, f"node {node} is longer than its longest holder's part")
            holders[node] = held
        require(sum([len(held) for held in holders.values()]) == living, "an entry is in no node's list")
        for node in live_nodes:
            up = self.nodes[node].parent
            if up != ABSENT:
                for slot in holders[node]:
                    require(
                        holders[up].get(slot) == self.nodes[up].n,
                        f"backend {slot} holds some of node {node} and not all of its parent {up}",
                    )

    def _check_lru(self):
        cdef uint32_t slot, entry, before
        pairs = 0
        seen = 0
        for slot in range(self.backend_end):
            if not self.backends[slot].live:
                require(
                    self.backends[slot].oldest == ABSENT and self.backends[slot].blocks == 0,
                    f"backend {slot} was removed and still holds something",
                )
                continue
            blocks = 0
            stamp = 0
            before = ABSENT
            passed = set()
            entry = self.backends[slot].oldest
            while entry != ABSENT:
                require(self.entries[entry].slot == slot, f"entry {entry} is in the list of backend {slot}")
                require(self.entries[entry].older == before, f"entry {entry} is wrongly linked to the older one")
                require(stamp <= self.entries[entry].stamp <= self.tick, f"entry {entry} is out of order")
                stamp = self.entries[entry].stamp
                node = self.entries[entry].node
                require(node not in passed, f"node {node} comes twice in the list of backend {slot}")
                passed.add(node)
                require(
                    self.nodes[node].parent not in passed, f"backend {slot}: node {node} is newer than its parent"
                )
                blocks += self.entries[entry].held
                seen += 1
                before = entry
                entry = self.entries[entry].newer
            require(self.backends[slot].newest == before, f"backend {slot}: the recent end is wrong")
            counted = self.backends[slot].blocks
            require(blocks == counted, f"backend {slot} holds {blocks} blocks, {counted} are counted")
            capacity = self.backends[slot].capacity
            require(capacity == 0 or blocks <= capacity, f"backend {slot} holds {blocks} of {capacity} blocks")
            pairs += blocks
        require(pairs == self.pairs, f"{pairs} pairs, {self.pairs} are counted")
        require(seen == self.entry_live, f"{seen} entries are in LRU lists, {self.entry_live} live")


cdef int require(bint holds, str message) except -1:
    # Not `assert`: check() keeps its word under python -O too.
    if not holds:
        raise AssertionError(message)
    return 0
