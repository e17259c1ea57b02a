"""What each engine holds, told by its KV events: an index from block hashes to ranks and tiers.

A rank is one data-parallel rank of one engine: what publishes one stream of events. For a request's own block hashes
(native/token_hash) match() says for each rank the longest unbroken run from the root, by tier.

Blocks. A block is named by its own hash, which covers its whole prefix. It links to its parent, for eviction alone: a
match asks the table of own hashes for every block, or finds it behind the block before, where a run that came in one
event lies. So a hole is always seen, and nothing has to be repaired when an engine removes the middle of a prefix.

Keys. What the engine calls a block is only the name under which it removes it. Engines with one seed call a block the same:
then the hash stands in the block. Where they differ (random seeds, a reloaded adapter), each hash has a Key, with its own
holders; a block is held by whoever holds it under any key. A rank's key names one block: a hash that the rank knows
is not looked at again, whatever the event says about tokens.

Holders. A slot is (rank, medium, group). A set of slots is immutable and shared by all blocks held by the same slots:
few sets for many blocks, however many ranks there are. A set is found by the exclusive or of its slots' random words.
In a match, a block with the set of the block before costs one comparison. References beyond the first of a (slot,
engine hash) are counted in a table aside.

Groups. A block is in a tier for a rank if every group of which the rank stored something, holds it there. Groups with
another block size than the lowest group's are left out (counted as other_size), and so is another block size in CPU
or storage, and a partial block (one hash of a smaller size).

Forgetting. clear_rank() marks the rank's slots dead, at once and at no cost; dead slots are swept out of all sets when they
are a third of all, so that a frame full of AllBlocksCleared costs no more than its size.

Memory. Everything but sets is held to 15/16 of the limit, sets to the limit. At the cap, a clock over the blocks evicts
leaves, and upward from them: the longest stored first, those stored again since its last turn spared once; whichever
ranks hold them lose them and are marked incomplete. An allocation that fails is treated as the cap. A match then finds
too little, never too much.

Invariants (check() walks them all):
 1. Every block is in the table of own hashes; every key of a block with holders is in the table of keys.
 2. A block's holders are the union of its keys' holders. Without any it has children, or it would be gone.
 3. A block's parent lives, and `children` counts who name it.
 4. No two sets are equal; `refs` counts who name one; none is without a reference but the empty one.
 5. Counters of blocks, pairs, extra references and bytes are what a walk finds.
"""

cimport cython
from cpython cimport array
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdio cimport snprintf
from libc.stdlib cimport free, realloc
from libc.string cimport memcpy, memset

from native.block_hash cimport BlockHashes
from native.kv_events cimport (
    EVENT_CLEARED,
    EVENT_REMOVED,
    EVENT_STORED,
    MEDIA,
    MEDIUM_GPU,
    Batch,
    Event,
    Reader,
    free_scratch,
    mix_block_extras,
    read_batch_head,
    read_batch_tail,
    read_event,
)
from native.open_table cimport (
    ABSENT,
    Table,
    TableSlot,
    fold,
    table_adopt,
    table_clear,
    table_erase,
    table_find,
    table_put,
    table_room,
)
from native.token_hash cimport chain_block, root_chain

import array as _array
import os

cdef extern from *:
    """
    #define KVI_EMPTY UINT32_MAX
    #define kvi_prefetch(p) __builtin_prefetch(p)
    """
    const uint32_t EMPTY_REF "KVI_EMPTY"
    void prefetch "kvi_prefetch"(const void* p) noexcept nogil

cdef enum:
    RANKS_AT_MOST = 4096
    MEMORY_LIMIT_AT_LEAST = 1 << 20
    CHUNK_BITS = 9
    CHUNK = 1 << CHUNK_BITS  # blocks or keys allocated at once: 16 KiB of blocks
    # A reference is 27 bits: a block, or a key with KEY_BIT. The five above it in a table's slot are of the hash.
    REF_BITS = 27
    REF_MASK = (1 << REF_BITS) - 1
    KEY_BIT = 1 << (REF_BITS - 1)
    COUNT_AT_MOST = KEY_BIT - 2
    RECENT = 1 << 31
    EMPTY_SET = 0
    SCRATCH_KEPT = 1 << 18
    EVICT_STRIDE = 64
    AHEAD = 16
    ORPHANS_PER_RANK = 1024
    DEAD_SLOTS_AT_MOST = 4096
    SLOT_FREE = 0
    SLOT_LIVE = 1
    SLOT_DEAD = 2
    HOW_NEW = 0
    HOW_ADDED = 1
    HOW_AGAIN = 2

cdef uint32_t NO_KEYS = ABSENT
cdef uint32_t ONE_KEY = ABSENT - 1
cdef uint32_t CHILDREN_MASK = 0x7FFFFFFF

MAX_RANKS = RANKS_AT_MOST
MAX_GROUPS = GROUPS
MIN_MEMORY_LIMIT_BYTES = MEMORY_LIMIT_AT_LEAST
MAX_ORPHANS_PER_RANK = ORPHANS_PER_RANK


# What glibc takes from the heap for an allocation: an 8-byte header, rounded up to 16, 32 at least.
cdef inline uint64_t heap_bytes(uint64_t size) noexcept nogil:
    cdef uint64_t chunk = (size + 23) & ~(<uint64_t>15)
    if size == 0:
        return 0
    return chunk if chunk > 32 else 32


@cython.final
cdef class Applied:
    def __init__(self):
        raise TypeError("Applied comes from KvIndex.apply()")

    @property
    def stored(self):
        return self.counts.stored

    @property
    def removed(self):
        return self.counts.removed

    @property
    def cleared(self):
        return self.counts.cleared

    @property
    def unknown(self):
        return self.counts.unknown

    @property
    def orphans(self):
        return self.counts.orphans

    @property
    def joined(self):
        return self.counts.joined

    @property
    def orphans_dropped(self):
        return self.counts.orphans_dropped

    @property
    def duplicates(self):
        return self.counts.duplicates

    @property
    def retiered(self):
        return self.counts.retiered

    @property
    def absent(self):
        return self.counts.absent

    @property
    def other_size(self):
        return self.counts.other_size

    @property
    def refused(self):
        return self.counts.refused

    @property
    def block_size_changed(self):
        return self.counts.block_size_changed

    def __repr__(self):
        counts = self.counts
        told = ", ".join([f"{name}={value}" for name, value in counts.items() if value])
        return f"<Applied {told}{' malformed' if self.malformed else ''}>"


@cython.final
cdef class KvIndex:
    # --- life ---

    def __cinit__(self, memory_limit_bytes):
        if memory_limit_bytes < MEMORY_LIMIT_AT_LEAST:
            raise ValueError(f"memory_limit_bytes must be at least {MEMORY_LIMIT_AT_LEAST}, not {memory_limit_bytes}")
        self.limit_bytes = memory_limit_bytes
        self.matched_gpu = _array.array("I", bytes(4 * RANKS_AT_MOST))
        self.matched_cpu = _array.array("I", bytes(4 * RANKS_AT_MOST))
        self.matched_any = _array.array("I", bytes(4 * RANKS_AT_MOST))
        # What does not move with what is held; scratch is counted as if it were always kept.
        self.bytes_used = sizeof(KvIndex) + 3 * heap_bytes(4 * RANKS_AT_MOST) + SCRATCH_KEPT
        self.block_free = self.key_free = self.set_free = self.slot_free = self.orphan_free = ABSENT
        self.memo_from = self.orphan_work = ABSENT
        for table in range(4):
            secret = int.from_bytes(os.urandom(8)), int.from_bytes(os.urandom(8)) | 1
            if table == 0:
                self.set_table.secret[0], self.set_table.secret[1] = secret
            elif table == 1:
                self.extra_refs.secret[0], self.extra_refs.secret[1] = secret
            elif table == 2:
                self.orphan_parents.secret[0], self.orphan_parents.secret[1] = secret
            else:
                self.orphan_hashes.secret[0], self.orphan_hashes.secret[1] = secret
        self.secret[0], self.secret[1] = int.from_bytes(os.urandom(8)), int.from_bytes(os.urandom(8)) | 1
        self.sets = <HolderSet*>self.allocate(NULL, 0, 16 * sizeof(HolderSet), self.limit_bytes)
        if (
            self.sets == NULL
            or not self.grow_table(&self.set_table, 1, self.limit_bytes)
            or not self.grow_table(&self.extra_refs, 1, self.limit_bytes)
            or not self.grow_table(&self.orphan_parents, 1, self.limit_bytes)
            or not self.grow_table(&self.orphan_hashes, 1, self.limit_bytes)
            or not self.grow_refs(&self.own_table, False)
            or not self.grow_refs(&self.key_table, True)
        ):
            raise MemoryError
        self.set_room = 16
        self.set_end = 1  # the empty set, which no table names
        memset(&self.sets[0], 0, sizeof(HolderSet))

    def __dealloc__(self):
        cdef uint32_t i
        for i in range(self.block_chunk_count):
            free(self.block_chunks[i])
        free(self.block_chunks)
        for i in range(self.key_chunk_count):
            free(self.key_chunks[i])
        free(self.key_chunks)
        for i in range(self.set_end):
            free(self.sets[i].slots)
        free(self.sets)
        for i in range(self.orphan_end):
            free(self.orphans[i].hashes)
        free(self.orphans)
        free(self.slots)
        free(self.ranks)
        free(self.alive)
        free(self.own_table.slots)
        free(self.key_table.slots)
        free(self.set_table.slots)
        free(self.extra_refs.slots)
        free(self.orphan_parents.slots)
        free(self.orphan_hashes.slots)
        free_scratch(&self.scratch)

    # --- ranks ---

    def add_rank(self):
        cdef uint32_t rank = 0
        cdef uint32_t room
        cdef void* grown
        cdef int i
        while rank < self.rank_end and self.ranks[rank].live:
            rank += 1
        if rank == self.rank_room:
            if rank >= RANKS_AT_MOST:
                raise ValueError(f"at most {RANKS_AT_MOST} ranks")
            room = max(8, 2 * self.rank_room)
            grown = self.allocate(self.alive, self.rank_room * 4, room * 4, self.limit_bytes)
            if grown == NULL:
                raise MemoryError
            # Should the next one fail, this one is merely larger than needed, and is counted as it was.
            self.alive = <uint32_t*>grown
            grown = self.allocate(self.ranks, self.rank_room * sizeof(Rank), room * sizeof(Rank), self.limit_bytes)
            if grown == NULL:
                self.bytes_used -= heap_bytes(room * 4) - heap_bytes(self.rank_room * 4)
                raise MemoryError
            self.ranks = <Rank*>grown
            self.rank_room = room
        if rank == self.rank_end:
            self.rank_end += 1
        memset(&self.ranks[rank], 0, sizeof(Rank))
        for i in range(TIER_SLOTS):
            self.ranks[rank].slot_of[i] = ABSENT
        self.ranks[rank].oldest_orphan = self.ranks[rank].newest_orphan = ABSENT
        self.ranks[rank].live = True
        return rank

    def remove_rank(self, Py_ssize_t rank):
        self.rank_at(rank)
        self.forget(<uint32_t>rank)
        self.ranks[rank].live = False
        for matched in (self.matched_gpu, self.matched_cpu, self.matched_any):
            matched[rank] = 0
        while self.rank_end > 0 and not self.ranks[self.rank_end - 1].live:
            self.rank_end -= 1
        self.purge_if_worth()

    def clear_rank(self, Py_ssize_t rank):
        self.rank_at(rank).incomplete = False
        self.forget(<uint32_t>rank)
        self.purge_if_worth()

    cdef Rank* rank_at(self, Py_ssize_t rank) except NULL:
        if rank < 0 or rank >= <Py_ssize_t>self.rank_end or not self.ranks[rank].live:
            raise ValueError(f"there is no rank {rank}")
        return &self.ranks[rank]

    # --- what events tell and what routing asks ---

    def apply(self, Py_ssize_t rank, bytes payload not None):
        cdef Reader reader
        cdef Batch batch
        cdef Event event
        cdef Applied applied = Applied.__new__(Applied)
        cdef uint32_t more = 0
        cdef uint64_t i
        cdef int done
        self.rank_at(rank)
        reader.p = <const uint8_t*>payload
        reader.end = reader.p + len(payload)
        if read_batch_head(&reader, &batch, &more):
            for i in range(batch.events):
                done = read_event(&reader, &self.scratch, &event)
                if done == 0:
                    applied.malformed = True
                    break
                if done < 0:
                    # No memory to read what follows: it is lost, and the rank is not complete any more.
                    applied.counts.refused += batch.events - i
                    self.ranks[rank].incomplete = True
                    break
                if event.kind == EVENT_STORED:
                    self.store_and_join(<uint32_t>rank, &event, &applied.counts)
                elif event.kind == EVENT_REMOVED:
                    self.remove(<uint32_t>rank, &event, &applied.counts)
                elif event.kind == EVENT_CLEARED:
                    applied.counts.cleared += 1
                    self.ranks[rank].incomplete = False
                    self.forget(<uint32_t>rank)
                    self.purge_if_worth()
                else:
                    applied.counts.unknown += 1
            else:
                if not read_batch_tail(&reader, &batch, more):
                    applied.malformed = True
        else:
            applied.malformed = True
        if self.scratch.hash_room * 8 + self.scratch.token_room * 4 > SCRATCH_KEPT:
            free_scratch(&self.scratch)
        applied.timestamp = batch.timestamp
        applied.data_parallel_rank = batch.rank
        return applied

    def match(self, BlockHashes blocks not None, uint32_t block_size):
        cdef array.array gpu = <array.array>self.matched_gpu
        cdef array.array cpu = <array.array>self.matched_cpu
        cdef array.array all_tiers = <array.array>self.matched_any
        if min(len(gpu), len(cpu), len(all_tiers)) < RANKS_AT_MOST:
            raise ValueError("the arrays of matches belong to the index, and were shortened")
        return self.match_blocks(
            blocks.data,
            <uint32_t>min(blocks.n, <Py_ssize_t>0x7FFFFFFF),
            block_size,
            gpu.data.as_uints,
            cpu.data.as_uints,
            all_tiers.data.as_uints,
        )

    # --- figures ---

    def __len__(self):
        cdef uint32_t rank
        cdef uint64_t held = 0
        for rank in range(self.rank_end):
            held += self.ranks[rank].blocks
        return held

    def blocks_of(self, Py_ssize_t rank):
        return self.rank_at(rank).blocks

    def evicted(self, Py_ssize_t rank):
        return self.rank_at(rank).evicted

    def incomplete(self, Py_ssize_t rank):
        return self.rank_at(rank).incomplete

    def orphans_of(self, Py_ssize_t rank):
        return self.rank_at(rank).orphans

    def rank_block_size(self, Py_ssize_t rank):
        return self.rank_at(rank).block_size

    @property
    def block_count(self):
        return self.block_live

    @property
    def memory_limit_bytes(self):
        return self.limit_bytes

    def memory_bytes(self):
        return self.bytes_used

    # --- memory ---

    cdef void* allocate(self, void* old, uint64_t old_size, uint64_t size, uint64_t limit) noexcept nogil:
        # The one way to the heap: it keeps the account and the limit, and a test can make it fail.
        cdef void* memory
        if self.fail_in > 0:
            self.fail_in -= 1
            if self.fail_in == 0:
                return NULL
        if self.bytes_used + heap_bytes(size) - heap_bytes(old_size) > limit:
            return NULL
        memory = realloc(old, size)
        if memory != NULL:
            self.bytes_used += heap_bytes(size) - heap_bytes(old_size)
        return memory

    cdef void release(self, void* old, uint64_t size) noexcept nogil:
        free(old)
        self.bytes_used -= heap_bytes(size)

    cdef bint grow_table(self, Table* table, uint64_t more, uint64_t limit) noexcept nogil:
        cdef size_t capacity = max(table.capacity, <size_t>8)
        cdef size_t old = table.capacity
        cdef TableSlot* slots
        if old > 0 and table.used + more <= table_room(old):
            return True
        while table.used + more > table_room(capacity):
            capacity *= 2
        slots = <TableSlot*>self.allocate(NULL, 0, capacity * sizeof(TableSlot), limit)
        if slots == NULL:
            return False
        self.release(table_adopt(table, slots, capacity), old * sizeof(TableSlot))
        return True

    cdef uint64_t soft_limit(self) noexcept nogil:
        return self.limit_bytes - self.limit_bytes // 16

    # --- tables of references: linear probing over 4-byte slots, at most four in five full; any number of slots ---

    cdef bint grow_refs(self, RefTable* table, bint of_keys) noexcept nogil:
        # By half, and refilled from the arena in its order: 13 ns a reference, twice in a reference's life. The first
        # takes a 2048th of the limit, so that an index of usual size grows seldom.
        cdef uint64_t capacity = table.capacity + table.capacity // 2
        cdef uint32_t* slots
        cdef uint32_t i
        cdef Block* block
        cdef Key* key
        if capacity == 0:
            capacity = min(self.limit_bytes // 8192, <uint64_t>1 << 24)
        slots = <uint32_t*>self.allocate(NULL, 0, capacity * sizeof(uint32_t), self.soft_limit())
        if slots == NULL:
            return False
        self.release(table.slots, table.capacity * sizeof(uint32_t))
        table.slots = slots
        table.capacity = capacity
        table.most = capacity // 5 * 4
        table.used = 0
        memset(slots, 0xFF, capacity * sizeof(uint32_t))
        for i in range(self.block_end):
            # Blocks come in order, their places do not: those of later ones are fetched ahead.
            if i + 16 < self.block_end:
                block = block_at(self, i + 16)
                prefetch(&slots[home_of(self, block.engine if of_keys else block.own, capacity)])
            block = block_at(self, i)
            if block.holders == ABSENT:
                continue
            if not of_keys:
                self.put_ref(table, block.own, i)
            elif block.keys == ONE_KEY:
                self.put_ref(table, block.engine, i)
        if of_keys:
            for i in range(self.key_end):
                key = key_at(self, i)
                if key.holders != ABSENT:
                    self.put_ref(table, key.engine, i | KEY_BIT)
        return True

    cdef void put_ref(self, RefTable* table, uint64_t hash, uint32_t ref) noexcept nogil:
        cdef uint64_t mixed = fold(hash ^ self.secret[0], self.secret[1])
        cdef uint64_t i = ((mixed >> 32) * table.capacity) >> 32
        while table.slots[i] != EMPTY_REF:
            i += 1
            if i == table.capacity:
                i = 0
        table.slots[i] = (<uint32_t>mixed & 31) << REF_BITS | ref
        table.used += 1

    cdef void erase_ref(self, RefTable* table, bint of_keys, uint64_t hash, uint32_t ref) noexcept nogil:
        # The slots behind are shifted back, so that there are no tombstones.
        cdef uint64_t mixed = fold(hash ^ self.secret[0], self.secret[1])
        cdef uint64_t hole = ((mixed >> 32) * table.capacity) >> 32
        cdef uint32_t wanted = (<uint32_t>mixed & 31) << REF_BITS | ref
        cdef uint64_t i, home
        while table.slots[hole] != wanted:
            hole += 1
            if hole == table.capacity:
                hole = 0
        i = hole
        while True:
            i += 1
            if i == table.capacity:
                i = 0
            if table.slots[i] == EMPTY_REF:
                break
            ref = table.slots[i] & REF_MASK
            if not of_keys:
                hash = block_at(self, ref).own
            elif ref & KEY_BIT:
                hash = key_at(self, ref & ~<uint32_t>KEY_BIT).engine
            else:
                hash = block_at(self, ref).engine
            home = ((fold(hash ^ self.secret[0], self.secret[1]) >> 32) * table.capacity) >> 32
            # A reference may fill the hole only if its probe, from its home to where it stands, passes the hole.
            if distance(home, i, table.capacity) >= distance(hole, i, table.capacity):
                table.slots[hole] = table.slots[i]
                hole = i
        table.slots[hole] = EMPTY_REF
        table.used -= 1

    cdef uint32_t find_own(self, uint64_t own) noexcept nogil:
        cdef uint64_t mixed = fold(own ^ self.secret[0], self.secret[1])
        cdef uint64_t i = ((mixed >> 32) * self.own_table.capacity) >> 32
        cdef uint32_t tag = <uint32_t>mixed & 31
        cdef uint32_t found = self.own_table.slots[i]
        while found != EMPTY_REF:
            if found >> REF_BITS == tag and block_at(self, found & REF_MASK).own == own:
                return found & REF_MASK
            i += 1
            if i == self.own_table.capacity:
                i = 0
            found = self.own_table.slots[i]
        return ABSENT

    cdef uint32_t find_key(self, uint64_t engine, uint32_t rank, uint32_t slot) noexcept nogil:
        # The reference under which `slot` holds the hash, or, without a slot, any slot of the rank.
        cdef uint64_t mixed = fold(engine ^ self.secret[0], self.secret[1])
        cdef uint64_t i = ((mixed >> 32) * self.key_table.capacity) >> 32
        cdef uint32_t tag = <uint32_t>mixed & 31
        cdef uint32_t found = self.key_table.slots[i]
        cdef uint32_t ref, holders
        cdef uint64_t hash
        cdef Key* key
        cdef Block* block
        while found != EMPTY_REF:
            if found >> REF_BITS == tag:
                ref = found & REF_MASK
                if ref & KEY_BIT:
                    key = key_at(self, ref & ~<uint32_t>KEY_BIT)
                    hash, holders = key.engine, key.holders
                else:
                    block = block_at(self, ref)
                    hash, holders = block.engine, block.holders
                if hash == engine:
                    if self.set_has_rank(holders, rank) if slot == ABSENT else self.set_has(holders, slot):
                        return ref
            i += 1
            if i == self.key_table.capacity:
                i = 0
            found = self.key_table.slots[i]
        return ABSENT

    cdef uint32_t block_of(self, uint32_t ref) noexcept nogil:
        return key_at(self, ref & ~<uint32_t>KEY_BIT).block if ref & KEY_BIT else ref

    # --- blocks and keys ---

    cdef bint grow_blocks(self) noexcept nogil:
        cdef uint32_t room
        cdef void* grown
        if self.block_end + CHUNK > COUNT_AT_MOST:
            return False
        if self.block_chunk_count == self.block_chunk_room:
            room = self.block_chunk_room + self.block_chunk_room // 2 + 8
            grown = self.allocate(
                self.block_chunks, self.block_chunk_room * sizeof(void*), room * sizeof(void*), self.soft_limit()
            )
            if grown == NULL:
                return False
            self.block_chunks = <Block**>grown
            self.block_chunk_room = room
        grown = self.allocate(NULL, 0, CHUNK * sizeof(Block), self.soft_limit())
        if grown == NULL:
            return False
        self.block_chunks[self.block_chunk_count] = <Block*>grown
        self.block_chunk_count += 1
        return True

    cdef bint make_room(self) noexcept nogil:
        # For one more block with its key, here and in both tables. At the cap that takes others out.
        cdef bint fits
        cdef int rounds
        for rounds in range(1024):
            fits = True
            if self.block_free == ABSENT and self.block_end == self.block_chunk_count * <uint32_t>CHUNK:
                fits = self.grow_blocks()
            if fits and self.own_table.used >= self.own_table.most:
                fits = self.grow_refs(&self.own_table, False)
            if fits and self.key_table.used + 1 >= self.key_table.most:
                fits = self.grow_refs(&self.key_table, True)
            if fits and self.bytes_used <= self.limit_bytes - self.limit_bytes // 32:
                return True
            if self.dead_pairs > 0:
                self.purge()
            elif self.evict(EVICT_STRIDE) == 0:
                return False
        return False

    cdef uint32_t new_key(self, uint64_t engine, uint32_t block, uint32_t holders) noexcept nogil:
        cdef uint32_t key = self.key_free
        cdef uint32_t room
        cdef void* grown
        if key != ABSENT:
            self.key_free = key_at(self, key).next
        else:
            if self.key_end == self.key_chunk_count * <uint32_t>CHUNK:
                if self.key_end + CHUNK > COUNT_AT_MOST:
                    return ABSENT
                if self.key_chunk_count == self.key_chunk_room:
                    room = self.key_chunk_room + self.key_chunk_room // 2 + 8
                    grown = self.allocate(
                        self.key_chunks, self.key_chunk_room * sizeof(void*), room * sizeof(void*), self.soft_limit()
                    )
                    if grown == NULL:
                        return ABSENT
                    self.key_chunks = <Key**>grown
                    self.key_chunk_room = room
                grown = self.allocate(NULL, 0, CHUNK * sizeof(Key), self.soft_limit())
                if grown == NULL:
                    return ABSENT
                self.key_chunks[self.key_chunk_count] = <Key*>grown
                self.key_chunk_count += 1
            key = self.key_end
            self.key_end += 1
        self.key_live += 1
        key_at(self, key).engine = engine
        key_at(self, key).block = block
        key_at(self, key).holders = holders
        self.sets[holders].refs += 1
        return key

    # --- sets of slots ---

    cdef bint set_has(self, uint32_t of, uint32_t slot) noexcept nogil:
        cdef const HolderSet* holders = &self.sets[of]
        cdef uint32_t low = 0
        cdef uint32_t high = holders.n
        cdef uint32_t middle
        while high - low > 8:
            middle = (low + high) // 2
            if holders.slots[middle] <= slot:
                low = middle
            else:
                high = middle
        while low < high:
            if holders.slots[low] == slot:
                return True
            low += 1
        return False

    cdef bint set_has_rank(self, uint32_t of, uint32_t rank) noexcept nogil:
        cdef const Rank* entry = &self.ranks[rank]
        cdef uint32_t left = entry.slot_count
        cdef uint32_t i = 0
        while left > 0:
            if entry.slot_of[i] != ABSENT:
                left -= 1
                if self.set_has(of, entry.slot_of[i]):
                    return True
            i += 1
        return False

    # The set with one slot more or less: an existing one, or a new one without a reference yet. ABSENT: no memory.
    cdef uint32_t set_changed(self, uint32_t of, uint32_t slot, bint add) noexcept nogil:
        cdef uint64_t hash
        cdef uint32_t check, found, n, room, i
        cdef uint32_t* slots
        cdef HolderSet* holders
        cdef void* grown
        if add and of == self.memo_from and slot == self.memo_slot:
            return self.memo_to
        hash = self.sets[of].hash ^ self.slots[slot].word
        check = self.sets[of].check ^ self.slots[slot].check_word
        n = self.sets[of].n + 1 if add else self.sets[of].n - 1
        if n == 0:
            return EMPTY_SET
        found = table_find(&self.set_table, hash, check)
        if found == ABSENT:
            if not self.grow_table(&self.set_table, 1, self.limit_bytes):
                return ABSENT
            if self.set_free == ABSENT and self.set_end == self.set_room:
                room = self.set_room + self.set_room // 2
                grown = self.allocate(
                    self.sets, self.set_room * sizeof(HolderSet), room * sizeof(HolderSet), self.limit_bytes
                )
                if grown == NULL:
                    return ABSENT
                self.sets = <HolderSet*>grown
                self.set_room = room
            slots = <uint32_t*>self.allocate(NULL, 0, n * sizeof(uint32_t), self.limit_bytes)
            if slots == NULL:
                return ABSENT
            if self.set_free != ABSENT:
                found = self.set_free
                self.set_free = self.sets[found].mapped
            else:
                found = self.set_end
                self.set_end += 1
            holders = &self.sets[of]
            i = 0
            while i < holders.n and holders.slots[i] < slot:
                slots[i] = holders.slots[i]
                i += 1
            if add:
                slots[i] = slot
                if i < holders.n:  # memcpy takes no null pointer, and the empty set has one
                    memcpy(slots + i + 1, holders.slots + i, (holders.n - i) * sizeof(uint32_t))
            else:
                memcpy(slots + i, holders.slots + i + 1, (holders.n - i - 1) * sizeof(uint32_t))
            self.sets[found].hash = hash
            self.sets[found].check = check
            self.sets[found].slots = slots
            self.sets[found].n = n
            self.sets[found].refs = 0
            self.sets[found].mapped = ABSENT
            self.set_live += 1
            table_put(&self.set_table, hash, check, found)
        if add:
            self.memo_from, self.memo_slot, self.memo_to = of, slot, found
        return found

    cdef void unref_set(self, uint32_t of) noexcept nogil:
        self.sets[of].refs -= 1
        self.drop_unused_set(of)

    cdef void drop_unused_set(self, uint32_t of) noexcept nogil:
        cdef HolderSet* holders = &self.sets[of]
        if holders.refs > 0 or of == EMPTY_SET:
            return
        if of == self.memo_from or of == self.memo_to:
            self.memo_from = ABSENT
        table_erase(&self.set_table, holders.hash, holders.check)
        self.release(holders.slots, holders.n * sizeof(uint32_t))
        holders.slots = NULL
        holders.n = 0
        holders.mapped = self.set_free
        self.set_free = of
        self.set_live -= 1

    cdef uint32_t slot_for(self, uint32_t rank, uint32_t medium, uint32_t group) noexcept nogil:
        cdef uint32_t place = medium * GROUPS + group
        cdef uint32_t slot = self.ranks[rank].slot_of[place]
        cdef uint32_t room
        cdef void* grown
        if slot != ABSENT:
            return slot
        if self.slot_free != ABSENT:
            slot = self.slot_free
            self.slot_free = self.slots[slot].next_free
        else:
            if self.slot_end == self.slot_room:
                room = self.slot_room + self.slot_room // 2 + 16
                grown = self.allocate(
                    self.slots, self.slot_room * sizeof(Slot), room * sizeof(Slot), self.limit_bytes
                )
                if grown == NULL:
                    return ABSENT
                self.slots = <Slot*>grown
                self.slot_room = room
            slot = self.slot_end
            self.slot_end += 1
            # Distinct secret words: two folds of the slot's number. The number comes again, so the words may too.
            self.slots[slot].word = fold(self.secret[0] + slot * <uint64_t>0x9E3779B97F4A7C15, self.secret[1])
            self.slots[slot].check_word = <uint32_t>fold(
                self.set_table.secret[0] - slot * <uint64_t>0xC2B2AE3D27D4EB4F, self.set_table.secret[1]
            )
        self.slots[slot].pairs = 0
        self.slots[slot].rank = rank
        self.slots[slot].medium = <uint8_t>medium
        self.slots[slot].group = <uint8_t>group
        self.slots[slot].state = SLOT_LIVE
        self.ranks[rank].slot_of[place] = slot
        self.ranks[rank].slot_count += 1
        self.ranks[rank].groups |= <uint32_t>1 << group
        return slot

    cdef void free_slot(self, uint32_t slot) noexcept nogil:
        self.slots[slot].state = SLOT_FREE
        self.slots[slot].next_free = self.slot_free
        self.slot_free = slot
        self.memo_from = ABSENT

    # --- holding and letting go ---

    cdef bint give_block(self, uint32_t block, uint32_t slot) noexcept nogil:
        # The slot is added to the block's holders. False: no memory, nothing changed.
        cdef uint32_t before = block_at(self, block).holders
        cdef uint32_t rank = self.slots[slot].rank
        cdef uint32_t after
        if self.set_has(before, slot):
            return True
        after = self.set_changed(before, slot, True)
        if after == ABSENT:
            return False
        if not (before != EMPTY_SET and self.ranks[rank].slot_count > 1 and self.set_has_rank(before, rank)):
            self.ranks[rank].blocks += 1
        block_at(self, block).holders = after
        self.sets[after].refs += 1
        self.unref_set(before)
        self.slots[slot].pairs += 1
        self.live_pairs += 1
        return True

    cdef int hold(self, uint32_t ref, uint32_t slot) noexcept nogil:
        # HOW_ADDED, HOW_AGAIN where the slot held it already, -1 without memory (then nothing changed).
        cdef Key* key
        cdef uint32_t before, after
        cdef uint32_t rank = self.slots[slot].rank
        if not ref & KEY_BIT:
            block_at(self, ref).children |= <uint32_t>RECENT
            if self.set_has(block_at(self, ref).holders, slot):
                self.count_extra(block_at(self, ref).engine, slot, rank)
                return HOW_AGAIN
            return HOW_ADDED if self.give_block(ref, slot) else -1
        key = key_at(self, ref & ~<uint32_t>KEY_BIT)
        block_at(self, key.block).children |= <uint32_t>RECENT
        before = key.holders
        if self.set_has(before, slot):
            self.count_extra(key.engine, slot, rank)
            return HOW_AGAIN
        after = self.set_changed(before, slot, True)
        if after == ABSENT:
            return -1
        self.sets[after].refs += 1
        if not self.give_block(key.block, slot):
            self.unref_set(after)
            return -1
        key.holders = after
        self.unref_set(before)
        return HOW_ADDED

    cdef void count_extra(self, uint64_t engine, uint32_t slot, uint32_t rank) noexcept nogil:
        cdef uint32_t extra = table_find(&self.extra_refs, engine, slot)
        if extra == ABSENT:
            if not self.grow_table(&self.extra_refs, 1, self.soft_limit()):
                # Forgotten: the first removal takes the block out, too early.
                self.ranks[rank].incomplete = True
                return
            extra = 0
        if extra < ABSENT - 1:
            table_put(&self.extra_refs, engine, slot, extra + 1)

    # The block of this own hash, held by the slot under this key; make_room() came before. ABSENT without memory.
    cdef uint32_t attach(self, uint64_t own, uint64_t engine, uint32_t parent, uint32_t slot, int* how) noexcept nogil:
        cdef uint32_t b = self.find_own(own)
        cdef uint32_t key, first
        cdef Block* block
        if b == ABSENT:
            how[0] = HOW_NEW
            if self.block_free != ABSENT:
                b = self.block_free
                block = block_at(self, b)
                self.block_free = block.parent
            else:
                b = self.block_end
                self.block_end += 1
                block = block_at(self, b)
            block.own = own
            block.engine = engine
            block.parent = parent
            block.holders = EMPTY_SET
            block.keys = NO_KEYS
            block.children = 0
            self.sets[EMPTY_SET].refs += 1
            self.block_live += 1
            if parent != ABSENT:
                block_at(self, parent).children += 1
            self.put_ref(&self.own_table, own, b)
        else:
            how[0] = HOW_ADDED
            block = block_at(self, b)
        if block.keys == NO_KEYS:
            if not self.give_block(b, slot):
                self.block_without_keys(b)
                return ABSENT
            block.engine = engine
            block.keys = ONE_KEY
            self.put_ref(&self.key_table, engine, b)
            return b
        block.children |= <uint32_t>RECENT
        if block.keys == ONE_KEY:
            if block.engine == engine:
                how[0] = self.hold(b, slot)
                return b if how[0] >= 0 else ABSENT
            # A second name: from now on each has its Key.
            first = self.new_key(block.engine, b, block.holders)
            if first == ABSENT:
                return ABSENT
            key_at(self, first).next = ABSENT
            self.erase_ref(&self.key_table, True, block.engine, b)
            self.put_ref(&self.key_table, block.engine, first | KEY_BIT)
            block.keys = first
        key = block.keys
        while key != ABSENT:
            if key_at(self, key).engine == engine:
                how[0] = self.hold(key | KEY_BIT, slot)
                return b if how[0] >= 0 else ABSENT
            key = key_at(self, key).next
        key = self.new_key(engine, b, EMPTY_SET)
        if key == ABSENT:
            return ABSENT
        key_at(self, key).next = block.keys
        block.keys = key
        self.put_ref(&self.key_table, engine, key | KEY_BIT)
        if self.hold(key | KEY_BIT, slot) < 0:
            self.unlink_key(key)
            return ABSENT
        return b

    cdef void let_go(self, uint32_t ref, uint64_t engine, uint32_t slot) noexcept nogil:
        # One reference less of a slot that has the key.
        cdef uint32_t extra = table_find(&self.extra_refs, engine, slot) if self.extra_refs.used > 0 else ABSENT
        cdef uint32_t rank = self.slots[slot].rank
        cdef uint32_t b = self.block_of(ref)
        cdef uint32_t before, after, key
        if extra != ABSENT:
            if extra > 1:
                table_put(&self.extra_refs, engine, slot, extra - 1)
            else:
                table_erase(&self.extra_refs, engine, slot)
            return
        if ref & KEY_BIT:
            key = ref & ~<uint32_t>KEY_BIT
            before = key_at(self, key).holders
            after = self.set_changed(before, slot, False)
            if after == ABSENT:
                self.drop_block(b)
                return
            key_at(self, key).holders = after
            self.sets[after].refs += 1
            self.unref_set(before)
            if after == EMPTY_SET:
                self.unlink_key(key)
            key = block_at(self, b).keys
            while key != ABSENT:
                if self.set_has(key_at(self, key).holders, slot):
                    return
                key = key_at(self, key).next
        before = block_at(self, b).holders
        after = self.set_changed(before, slot, False)
        if after == ABSENT:
            self.drop_block(b)
            return
        block_at(self, b).holders = after
        self.sets[after].refs += 1
        self.unref_set(before)
        self.slots[slot].pairs -= 1
        self.live_pairs -= 1
        if after == EMPTY_SET or not self.set_has_rank(after, rank):
            self.ranks[rank].blocks -= 1
        if after == EMPTY_SET:
            if block_at(self, b).keys == ONE_KEY:
                self.erase_ref(&self.key_table, True, engine, b)
                block_at(self, b).keys = NO_KEYS
            self.block_without_keys(b)

    cdef void unlink_key(self, uint32_t key) noexcept nogil:
        # Out of its block's list and the table, and free.
        cdef Key* entry = key_at(self, key)
        cdef Block* block = block_at(self, entry.block)
        cdef uint32_t before
        self.erase_ref(&self.key_table, True, entry.engine, key | KEY_BIT)
        if block.keys == key:
            block.keys = entry.next
        else:
            before = block.keys
            while key_at(self, before).next != key:
                before = key_at(self, before).next
            key_at(self, before).next = entry.next
        self.unref_set(entry.holders)
        entry.holders = ABSENT
        entry.next = self.key_free
        self.key_free = key
        self.key_live -= 1

    cdef void block_without_keys(self, uint32_t block) noexcept nogil:
        # Nobody holds it. While it has children it stays, to be found by its own hash; else it goes.
        if block_at(self, block).children & CHILDREN_MASK == 0:
            self.free_block(block)

    cdef void free_block(self, uint32_t block) noexcept nogil:
        cdef Block* entry
        cdef uint32_t parent
        while True:
            entry = block_at(self, block)
            parent = entry.parent
            self.erase_ref(&self.own_table, False, entry.own, block)
            self.unref_set(entry.holders)
            entry.holders = ABSENT
            entry.parent = self.block_free
            self.block_free = block
            self.block_live -= 1
            if parent == ABSENT:
                return
            entry = block_at(self, parent)
            entry.children -= 1
            if entry.children & CHILDREN_MASK != 0 or entry.keys != NO_KEYS:
                return
            block = parent

    cdef void drop_block(self, uint32_t block) noexcept nogil:
        # Whoever holds it loses it, and is not complete any more.
        cdef Block* entry = block_at(self, block)
        cdef const HolderSet* holders = &self.sets[entry.holders]
        cdef const HolderSet* of_key
        cdef uint32_t i, key, slot
        cdef Rank* rank
        self.stamp += 1
        for i in range(holders.n):
            slot = holders.slots[i]
            self.slots[slot].pairs -= 1
            if self.slots[slot].state == SLOT_DEAD:
                self.dead_pairs -= 1
                continue
            self.live_pairs -= 1
            rank = &self.ranks[self.slots[slot].rank]
            if rank.stamp != self.stamp:
                rank.stamp = self.stamp
                rank.blocks -= 1
                rank.evicted += 1
                rank.incomplete = True
            if entry.keys == ONE_KEY and self.extra_refs.used > 0:
                table_erase(&self.extra_refs, entry.engine, slot)
        if entry.keys == ONE_KEY:
            self.erase_ref(&self.key_table, True, entry.engine, block)
            entry.keys = NO_KEYS
        while entry.keys != NO_KEYS:
            key = entry.keys
            of_key = &self.sets[key_at(self, key).holders]
            for i in range(of_key.n):
                table_erase(&self.extra_refs, key_at(self, key).engine, of_key.slots[i])
            self.unlink_key(key)
        self.unref_set(entry.holders)
        entry.holders = EMPTY_SET
        self.sets[EMPTY_SET].refs += 1
        self.block_without_keys(block)

    cdef uint32_t evict(self, uint32_t count) noexcept nogil:
        cdef uint32_t evicted = 0
        cdef uint64_t looked = 0
        cdef uint32_t block, parent
        cdef Block* entry
        while evicted < count and looked < 2 * <uint64_t>self.block_end:
            looked += 1
            self.hand += 1
            if self.hand >= self.block_end:
                self.hand = 0
            block = self.hand
            entry = block_at(self, block)
            if entry.holders == ABSENT or entry.children & CHILDREN_MASK:
                continue
            if entry.children & <uint32_t>RECENT:
                entry.children &= CHILDREN_MASK
                continue
            while True:
                parent = block_at(self, block).parent
                self.drop_block(block)
                evicted += 1
                if parent == ABSENT or evicted >= count:
                    break
                entry = block_at(self, parent)
                if entry.holders == ABSENT or entry.children & CHILDREN_MASK:
                    break
                block = parent
        return evicted

    # --- forgetting a rank ---

    cdef void forget(self, uint32_t rank) noexcept nogil:
        cdef Rank* entry = &self.ranks[rank]
        cdef uint32_t slot
        cdef uint32_t i = 0
        for i in range(<uint32_t>TIER_SLOTS):
            slot = entry.slot_of[i]
            if slot == ABSENT:
                continue
            entry.slot_of[i] = ABSENT
            if self.slots[slot].pairs == 0:
                self.free_slot(slot)
            else:
                self.slots[slot].state = SLOT_DEAD
                self.dead_slots += 1
                self.dead_pairs += self.slots[slot].pairs
                self.live_pairs -= self.slots[slot].pairs
        entry.slot_count = 0
        entry.groups = 0
        entry.blocks = 0
        while entry.oldest_orphan != ABSENT:
            i = entry.oldest_orphan
            self.unlink_orphan(i)
            self.free_orphan(i)
        self.memo_from = ABSENT

    cdef void purge_if_worth(self) noexcept nogil:
        # So that a sweep costs no more than what was stored since the last one.
        if self.dead_pairs > 0 and (
            2 * self.dead_pairs >= self.live_pairs + self.block_end // 4 or self.dead_slots >= DEAD_SLOTS_AT_MOST
        ):
            self.purge()

    cdef uint32_t living(self, uint32_t of) noexcept nogil:
        # The set without its dead slots, remembered in `mapped`. ABSENT: no memory.
        cdef uint32_t at = of
        cdef uint32_t after, i
        cdef bint found = True
        if self.sets[of].mapped != ABSENT:
            return self.sets[of].mapped
        while found:
            found = False
            for i in range(self.sets[at].n):
                if self.slots[self.sets[at].slots[i]].state == SLOT_DEAD:
                    after = self.set_changed(at, self.sets[at].slots[i], False)
                    if at != of:
                        self.drop_unused_set(at)
                    if after == ABSENT:
                        return ABSENT
                    at = after
                    found = True
                    break
        self.sets[of].mapped = at
        return at

    cdef void purge(self) noexcept nogil:
        cdef uint32_t i, after
        cdef size_t place
        cdef Block* block
        cdef Key* key
        cdef TableSlot* slot
        self.forget_mapped()
        # Extra references first: they name slots, which are about to be free. Erasing shifts what follows back.
        place = 0
        while place < self.extra_refs.capacity and self.extra_refs.used > 0:
            slot = &self.extra_refs.slots[place]
            if slot.value != ABSENT and self.slots[slot.owner].state == SLOT_DEAD:
                table_erase(&self.extra_refs, slot.hash, slot.owner)
            else:
                place += 1
        for i in range(self.block_end):
            block = block_at(self, i)
            if block.holders == ABSENT or block.holders == EMPTY_SET:
                continue
            after = self.living(block.holders)
            if after == block.holders:
                continue
            # Its keys' sets are subsets of its own: they change only where this one does.
            if after == ABSENT:
                self.drop_block(i)
                self.forget_mapped()
                continue
            self.sets[after].refs += 1
            if not self.purge_keys(i):
                self.unref_set(after)
                self.drop_block(i)
                self.forget_mapped()
                continue
            self.unref_set(block.holders)
            block.holders = after
            if after == EMPTY_SET:
                if block.keys == ONE_KEY:
                    self.erase_ref(&self.key_table, True, block.engine, i)
                    block.keys = NO_KEYS
                self.block_without_keys(i)
        for i in range(self.slot_end):
            if self.slots[i].state == SLOT_DEAD:
                self.free_slot(i)
        self.dead_slots = 0
        self.dead_pairs = 0
        self.trim()

    cdef void forget_mapped(self) noexcept nogil:
        cdef uint32_t i
        for i in range(self.set_end):
            if self.sets[i].slots != NULL:
                self.sets[i].mapped = ABSENT
        self.sets[EMPTY_SET].mapped = EMPTY_SET

    cdef bint purge_keys(self, uint32_t block) noexcept nogil:
        cdef uint32_t key = block_at(self, block).keys
        cdef uint32_t next_key, after
        if key == ONE_KEY:
            return True
        while key != ABSENT:
            next_key = key_at(self, key).next
            after = self.living(key_at(self, key).holders)
            if after == ABSENT:
                return False
            if after != key_at(self, key).holders:
                self.sets[after].refs += 1
                self.unref_set(key_at(self, key).holders)
                key_at(self, key).holders = after
                if after == EMPTY_SET:
                    self.unlink_key(key)
            key = next_key
        return True

    cdef void trim(self) noexcept nogil:
        # Chunks at the end that hold nothing go back. The lists of free ones are made anew, lowest first.
        cdef uint32_t i
        cdef uint32_t end = self.block_end
        while end > 0 and block_at(self, end - 1).holders == ABSENT:
            end -= 1
        self.block_end = end
        while self.block_chunk_count > (end + CHUNK - 1) >> CHUNK_BITS:
            self.block_chunk_count -= 1
            self.release(self.block_chunks[self.block_chunk_count], CHUNK * sizeof(Block))
        self.block_free = ABSENT
        i = end
        while i > 0:
            i -= 1
            if block_at(self, i).holders == ABSENT:
                block_at(self, i).parent = self.block_free
                self.block_free = i
        end = self.key_end
        while end > 0 and key_at(self, end - 1).holders == ABSENT:
            end -= 1
        self.key_end = end
        while self.key_chunk_count > (end + CHUNK - 1) >> CHUNK_BITS:
            self.key_chunk_count -= 1
            self.release(self.key_chunks[self.key_chunk_count], CHUNK * sizeof(Key))
        self.key_free = ABSENT
        i = end
        while i > 0:
            i -= 1
            if key_at(self, i).holders == ABSENT:
                key_at(self, i).next = self.key_free
                self.key_free = i

    # --- events ---

    cdef void remove(self, uint32_t rank, const Event* event, Counts* counts) noexcept nogil:
        cdef uint32_t slot, ref, place
        cdef size_t i
        if event.group >= GROUPS:
            counts.unknown += 1
            return
        place = event.medium * GROUPS + event.group
        for i in range(event.hash_count):
            slot = self.ranks[rank].slot_of[place]
            ref = ABSENT
            if slot != ABSENT:
                ref = self.find_key(event.hashes[i], rank, slot)
            if ref != ABSENT:
                self.let_go(ref, event.hashes[i], slot)
                counts.removed += 1
            elif self.ranks[rank].orphans == 0 or not self.cut_orphan(rank, event.hashes[i], place, counts):
                counts.absent += 1

    cdef void retier(self, uint32_t rank, const Event* event, Counts* counts) noexcept nogil:
        cdef uint32_t slot, ref
        cdef size_t i
        cdef int how
        for i in range(event.hash_count):
            ref = self.find_key(event.hashes[i], rank, ABSENT)
            if ref == ABSENT:
                counts.absent += 1
                continue
            slot = self.slot_for(rank, event.medium, event.group)
            how = self.hold(ref, slot) if slot != ABSENT else -1
            if how == HOW_ADDED:
                counts.retiered += 1
            elif how == HOW_AGAIN:
                counts.duplicates += 1
            else:
                counts.refused += 1
                self.ranks[rank].incomplete = True

    cdef bint right_size(self, uint32_t rank, const Event* event, Counts* counts) noexcept nogil:
        # Whether the event is of the rank's block size, which it may be what sets. The rule is told at the top.
        cdef Rank* entry = &self.ranks[rank]
        if event.block_size == entry.block_size:
            if event.group < entry.main_group:
                entry.main_group = event.group
            return True
        if entry.block_size != 0 and entry.blocks > 0:
            if (
                event.group > entry.main_group
                or event.medium != MEDIUM_GPU
                or (event.hash_count == 1 and event.block_size < entry.block_size)
            ):
                counts.other_size += 1
                return False
            if event.group == entry.main_group:
                counts.block_size_changed = True
            self.forget(rank)
            self.purge_if_worth()
        elif entry.block_size != 0:
            if event.group == entry.main_group:
                counts.block_size_changed = True
            self.forget(rank)  # orphans
        entry.block_size = event.block_size
        entry.main_group = event.group
        return True

    cdef void store(self, uint32_t rank, const Event* event, Counts* counts) noexcept nogil:
        cdef uint32_t parent = ABSENT
        cdef uint32_t slot, ref, block
        cdef uint64_t chain
        cdef uint64_t ahead[AHEAD]
        cdef const uint8_t* after_extras[AHEAD]
        cdef size_t ahead_begin = 0
        cdef size_t ahead_end = 0
        cdef size_t i
        cdef int how = HOW_NEW
        cdef Reader extras
        cdef char number[24]
        cdef uint64_t count = 0
        if event.group >= GROUPS:
            counts.unknown += 1
            return
        if event.hash_count == 0:
            return
        if event.token_count == 0:
            self.retier(rank, event, counts)
            return
        if not self.right_size(rank, event, counts):
            return
        if event.has_parent:
            ref = self.find_key(event.parent, rank, ABSENT)
            if ref != ABSENT:
                parent = self.block_of(ref)
                chain = block_at(self, parent).own
            else:
                chain = 0
                # A first block that is known does without its parent.
                if self.find_key(event.hashes[0], rank, ABSENT) == ABSENT:
                    self.keep_orphan(rank, event, counts)
                    return
        elif event.adapter != NULL:
            chain = root_chain(event.adapter, event.adapter_size)
        elif event.has_adapter_id:
            # To 0.14 an adapter has only a number here, which no request tells: kept apart from all names.
            number[0] = 0
            chain = root_chain(
                <const uint8_t*>number, 1 + <size_t>snprintf(number + 1, 23, b"%lld", <long long>event.adapter_id)
            )
        else:
            chain = 0
        slot = self.slot_for(rank, event.medium, event.group)
        if slot == ABSENT:
            counts.refused += event.hash_count
            self.ranks[rank].incomplete = True
            return
        extras.p = extras.end = NULL
        if event.extras != NULL:
            extras.p = event.extras
            extras.end = event.extras_end
            skip_array_head(&extras)
        if parent != ABSENT:
            block_at(self, parent).children += 1  # so that nothing evicts it while its child is made
        for i in range(event.hash_count):
            if i == ahead_end:
                # Hashes of the next blocks, as long as none is known under another one, and their places in the tables:
                # what is fetched for one is there when its turn comes.
                ahead_begin = i
                while ahead_end < event.hash_count and ahead_end < i + AHEAD:
                    if extras.p != extras.end:
                        chain = mix_block_extras(&extras, chain, event)
                    chain = chain_block(chain, event.tokens + ahead_end * event.block_size, event.block_size)
                    ahead[ahead_end - i] = chain
                    prefetch(&self.own_table.slots[home_of(self, chain, self.own_table.capacity)])
                    prefetch(
                        &self.key_table.slots[home_of(self, event.hashes[ahead_end], self.key_table.capacity)]
                    )
                    after_extras[ahead_end - i] = extras.p
                    ahead_end += 1
            block = ABSENT
            if (
                (self.block_free == ABSENT and self.block_end == self.block_chunk_count * <uint32_t>CHUNK)
                or self.own_table.used >= self.own_table.most
                or self.key_table.used + 1 >= self.key_table.most
                or self.bytes_used > self.limit_bytes - self.limit_bytes // 32
            ) and not self.make_room():
                how = -1
            else:
                ref = self.find_key(event.hashes[i], rank, ABSENT)
                if ref != ABSENT:
                    how = self.hold(ref, slot)
                    block = self.block_of(ref)
                else:
                    block = self.attach(ahead[i - ahead_begin], event.hashes[i], parent, slot, &how)
                    if block == ABSENT:
                        how = -1
            if how < 0:
                # What comes behind a block that is not there can be found by no match.
                counts.refused += event.hash_count - i
                self.ranks[rank].incomplete = True
                break
            if how == HOW_AGAIN:
                counts.duplicates += 1
            else:
                counts.stored += 1
            block_at(self, block).children += 1
            if parent != ABSENT:
                block_at(self, parent).children -= 1
            parent = block
            if block_at(self, block).own != ahead[i - ahead_begin]:
                # Known by another hash than this event makes of it: what follows hangs on that one.
                chain = block_at(self, block).own
                extras.p = after_extras[i - ahead_begin]
                ahead_end = i + 1
        if parent != ABSENT:
            block_at(self, parent).children -= 1

    cdef void store_and_join(self, uint32_t rank, Event* event, Counts* counts) noexcept nogil:
        cdef uint32_t orphan
        cdef Reader reader
        self.store(rank, event, counts)
        if self.ranks[rank].orphans == 0:
            return
        self.find_joining(rank, event)
        while self.orphan_work != ABSENT:
            orphan = self.orphan_work
            self.orphan_work = self.orphans[orphan].newer
            reader.p = <const uint8_t*>(self.orphans[orphan].hashes + self.orphans[orphan].count)
            reader.end = reader.p + self.orphans[orphan].size
            # It was read before: it is well-formed, and the scratch was large enough for it or is made so.
            if read_event(&reader, &self.scratch, event) == 1:
                event.hash_count = self.orphans[orphan].kept
                event.token_count = event.hash_count * event.block_size
                counts.joined += 1
                self.store(rank, event, counts)
                if self.ranks[rank].orphans > 0:
                    self.find_joining(rank, event)
            else:
                counts.orphans_dropped += 1
                self.ranks[rank].incomplete = True
            self.free_orphan(orphan)

    # --- orphans ---

    cdef void find_joining(self, uint32_t rank, const Event* event) noexcept nogil:
        # Takes those whose parent is now known into the work list.
        cdef uint32_t orphan
        cdef size_t i
        for i in range(event.hash_count):
            orphan = table_find(&self.orphan_parents, event.hashes[i], rank)
            if orphan == ABSENT or self.find_key(event.hashes[i], rank, ABSENT) == ABSENT:
                continue
            while orphan != ABSENT:
                self.unlink_orphan(orphan)
                self.orphans[orphan].newer = self.orphan_work
                self.orphan_work = orphan
                orphan = table_find(&self.orphan_parents, event.hashes[i], rank)

    cdef void keep_orphan(self, uint32_t rank, const Event* event, Counts* counts) noexcept nogil:
        cdef Rank* entry = &self.ranks[rank]
        cdef uint64_t size = <uint64_t>(event.end - event.begin)
        cdef uint64_t need = event.hash_count * sizeof(uint64_t) + size
        cdef uint64_t most = self.limit_bytes // 16
        cdef uint32_t orphan, room
        cdef size_t i
        cdef uint64_t* memory
        cdef void* grown
        # One hash stands in one orphan only, so that one removal finds it. What is left out is found too little.
        for i in range(event.hash_count):
            if table_find(&self.orphan_hashes, event.hashes[i], rank) != ABSENT:
                counts.duplicates += 1
                return
        while entry.orphans > 0 and (
            entry.orphans >= ORPHANS_PER_RANK or self.orphan_bytes + heap_bytes(need) > most
        ):
            orphan = entry.oldest_orphan
            self.unlink_orphan(orphan)
            self.free_orphan(orphan)
            counts.orphans_dropped += 1
        counts.orphans += 1
        if self.orphan_bytes + heap_bytes(need) > most:
            counts.orphans_dropped += 1
            return
        if self.orphan_free == ABSENT and self.orphan_end == self.orphan_room:
            room = self.orphan_room + self.orphan_room // 2 + 16
            grown = self.allocate(
                self.orphans, self.orphan_room * sizeof(Orphan), room * sizeof(Orphan), self.soft_limit()
            )
            if grown != NULL:
                self.orphans = <Orphan*>grown
                self.orphan_room = room
        memory = NULL
        if (
            (self.orphan_free != ABSENT or self.orphan_end < self.orphan_room)
            and self.grow_table(&self.orphan_parents, 1, self.soft_limit())
            and self.grow_table(&self.orphan_hashes, event.hash_count, self.soft_limit())
        ):
            memory = <uint64_t*>self.allocate(NULL, 0, need, self.soft_limit())
        if memory == NULL:
            counts.orphans_dropped += 1
            return
        if self.orphan_free != ABSENT:
            orphan = self.orphan_free
            self.orphan_free = self.orphans[orphan].next
        else:
            orphan = self.orphan_end
            self.orphan_end += 1
        memcpy(memory, event.hashes, event.hash_count * sizeof(uint64_t))
        memcpy(memory + event.hash_count, event.begin, size)
        self.orphan_bytes += heap_bytes(need)
        self.orphans[orphan].hashes = memory
        self.orphans[orphan].parent = event.parent
        self.orphans[orphan].bytes = need
        self.orphans[orphan].size = <uint32_t>size
        self.orphans[orphan].count = self.orphans[orphan].kept = <uint32_t>event.hash_count
        self.orphans[orphan].rank = rank
        self.orphans[orphan].slot_key = event.medium * GROUPS + event.group
        self.orphans[orphan].next = table_find(&self.orphan_parents, event.parent, rank)
        table_put(&self.orphan_parents, event.parent, rank, orphan)
        for i in range(event.hash_count):
            if table_find(&self.orphan_hashes, event.hashes[i], rank) != ABSENT:
                # Twice in one event: no prefix has that. Kept up to there.
                self.orphans[orphan].kept = <uint32_t>i
                break
            table_put(&self.orphan_hashes, event.hashes[i], rank, orphan)
        self.orphans[orphan].older = entry.newest_orphan
        self.orphans[orphan].newer = ABSENT
        if entry.newest_orphan != ABSENT:
            self.orphans[entry.newest_orphan].newer = orphan
        else:
            entry.oldest_orphan = orphan
        entry.newest_orphan = orphan
        entry.orphans += 1

    cdef void unlink_orphan(self, uint32_t orphan) noexcept nogil:
        # Out of both tables and the rank's list; the memory is still there.
        cdef Orphan* entry = &self.orphans[orphan]
        cdef Rank* rank = &self.ranks[entry.rank]
        cdef uint32_t at = table_find(&self.orphan_parents, entry.parent, entry.rank)
        cdef uint32_t i
        if at != orphan:
            while self.orphans[at].next != orphan:
                at = self.orphans[at].next
            self.orphans[at].next = entry.next
        elif entry.next != ABSENT:
            table_put(&self.orphan_parents, entry.parent, entry.rank, entry.next)
        else:
            table_erase(&self.orphan_parents, entry.parent, entry.rank)
        for i in range(entry.kept):
            table_erase(&self.orphan_hashes, entry.hashes[i], entry.rank)
        if entry.older != ABSENT:
            self.orphans[entry.older].newer = entry.newer
        else:
            rank.oldest_orphan = entry.newer
        if entry.newer != ABSENT:
            self.orphans[entry.newer].older = entry.older
        else:
            rank.newest_orphan = entry.older
        rank.orphans -= 1

    cdef void free_orphan(self, uint32_t orphan) noexcept nogil:
        cdef Orphan* entry = &self.orphans[orphan]
        self.orphan_bytes -= heap_bytes(entry.bytes)
        self.release(entry.hashes, entry.bytes)
        entry.hashes = NULL
        entry.next = self.orphan_free
        self.orphan_free = orphan

    cdef bint cut_orphan(self, uint32_t rank, uint64_t engine, uint32_t slot_key, Counts* counts) noexcept nogil:
        # A removed hash takes those behind it with it: deepest first is how engines remove.
        cdef uint32_t orphan = table_find(&self.orphan_hashes, engine, rank)
        cdef Orphan* entry
        if orphan == ABSENT or self.orphans[orphan].slot_key != slot_key:
            return False
        entry = &self.orphans[orphan]
        while True:
            entry.kept -= 1
            table_erase(&self.orphan_hashes, entry.hashes[entry.kept], rank)
            if entry.hashes[entry.kept] == engine:
                break
        counts.removed += 1
        if entry.kept == 0:
            self.unlink_orphan(orphan)
            self.free_orphan(orphan)
            counts.orphans_dropped += 1
        return True

    # --- match ---

    cdef uint32_t match_blocks(
        self, const uint64_t* blocks, uint32_t n, uint32_t block_size, uint32_t* gpu, uint32_t* cpu, uint32_t* all_tiers
    ) noexcept nogil:
        cdef uint32_t i = 0
        cdef uint32_t k, alive_count = 0
        cdef uint32_t at = ABSENT - 1
        cdef uint32_t before = ABSENT
        cdef uint32_t kept, lost, held
        cdef const HolderSet* holders
        cdef const Block* block
        cdef const Slot* slot
        cdef Rank* rank
        for k in range(self.rank_end):
            gpu[k] = 0
            cpu[k] = 0
            all_tiers[k] = 0
        while i < n:
            # A run that came in one event lies in a row: then the next block is the next place.
            at += 1
            if at < self.block_end:
                block = block_at(self, at)
            if at >= self.block_end or block.own != blocks[i] or block.holders == ABSENT:
                if i + 8 < n:
                    prefetch(&self.own_table.slots[home_of(self, blocks[i + 8], self.own_table.capacity)])
                at = self.find_own(blocks[i])
                if at == ABSENT:
                    break
                block = block_at(self, at)
            if block.holders == before:
                i += 1
                continue
            before = block.holders
            holders = &self.sets[before]
            self.stamp += 1
            for k in range(holders.n):
                slot = &self.slots[holders.slots[k]]
                if slot.state != SLOT_LIVE or self.ranks[slot.rank].block_size != block_size:
                    continue
                rank = &self.ranks[slot.rank]
                if rank.stamp != self.stamp:
                    rank.stamp = self.stamp
                    rank.in_medium[0] = rank.in_medium[1] = rank.in_medium[2] = 0
                    if i == 0:
                        rank.alive = 7
                        self.alive[alive_count] = slot.rank
                        alive_count += 1
                rank.in_medium[slot.medium] |= <uint32_t>1 << slot.group
            kept = 0
            for k in range(alive_count):
                rank = &self.ranks[self.alive[k]]
                held = 0
                if rank.stamp == self.stamp:
                    if rank.in_medium[0] == rank.groups:
                        held = 7
                    elif rank.in_medium[0] | rank.in_medium[1] == rank.groups:
                        held = 6
                    elif rank.in_medium[0] | rank.in_medium[1] | rank.in_medium[2] == rank.groups:
                        held = 4
                lost = rank.alive & ~held
                if lost & 1:
                    gpu[self.alive[k]] = i
                if lost & 2:
                    cpu[self.alive[k]] = i
                if lost & 4:
                    all_tiers[self.alive[k]] = i
                rank.alive &= held
                if rank.alive:
                    self.alive[kept] = self.alive[k]
                    kept += 1
            alive_count = kept
            if alive_count == 0:
                return i
            i += 1
        for k in range(alive_count):
            rank = &self.ranks[self.alive[k]]
            if rank.alive & 1:
                gpu[self.alive[k]] = i
            if rank.alive & 2:
                cpu[self.alive[k]] = i
            if rank.alive & 4:
                all_tiers[self.alive[k]] = i
        return i

    # --- for tests ---

    def _fail_allocation(self, uint64_t after):
        self.fail_in = after

    def _purge(self):
        self.purge()

    def holdings(self, Py_ssize_t rank):
        cdef uint32_t i, k, key
        cdef Block* block
        cdef const HolderSet* holders
        self.rank_at(rank)
        result = {}
        for i in range(self.block_end):
            block = block_at(self, i)
            if block.holders == ABSENT or block.keys == NO_KEYS:
                continue
            names = []
            if block.keys == ONE_KEY:
                names.append((block.engine, block.holders))
            else:
                key = block.keys
                while key != ABSENT:
                    names.append((key_at(self, key).engine, key_at(self, key).holders))
                    key = key_at(self, key).next
            for engine, of in names:
                holders = &self.sets[<uint32_t>of]
                refs = {}
                for k in range(holders.n):
                    slot = holders.slots[k]
                    if self.slots[slot].state == SLOT_LIVE and self.slots[slot].rank == <uint32_t>rank:
                        extra = table_find(&self.extra_refs, engine, slot)
                        place = (self.slots[slot].medium, self.slots[slot].group)
                        refs[place] = 1 + (0 if extra == ABSENT else extra)
                if refs:
                    require(engine not in result, f"rank {rank} holds two blocks under hash {engine}")
                    result[engine] = (block.own, refs)
        return result

    def check(self):
        set_refs = self._check_blocks()
        self._check_sets(set_refs)
        self._check_slots()
        self._check_orphans()
        self._check_bytes()

    def _check_blocks(self):
        cdef uint32_t i, key, k
        cdef Block* block
        cdef const HolderSet* holders
        set_refs = {}
        children = {}
        keys_seen = 0
        live = 0
        key_refs = 0
        extras = 0
        for i in range(self.block_end):
            block = block_at(self, i)
            if block.holders == ABSENT:
                continue
            live += 1
            name = f"block {i}"
            require(self.find_own(block.own) == i, f"{name} is not found by its own hash")
            set_refs[block.holders] = set_refs.get(block.holders, 0) + 1
            if block.parent != ABSENT:
                require(block.parent < self.block_end, f"{name}: parent {block.parent}")
                require(block_at(self, block.parent).holders != ABSENT, f"{name}: its parent is free")
                children[block.parent] = children.get(block.parent, 0) + 1
            names = []
            if block.keys == ONE_KEY:
                names.append((block.engine, block.holders))
                require(self._names(block.engine, i), f"{name} is not found by its engine hash")
                key_refs += 1
            elif block.keys != NO_KEYS:
                key = block.keys
                while key != ABSENT:
                    require(key < self.key_end and key_at(self, key).block == i, f"{name}: key {key} is another's")
                    require(key_at(self, key).holders not in (ABSENT, EMPTY_SET), f"{name}: key {key} holds nothing")
                    require(self._names(key_at(self, key).engine, key | KEY_BIT), f"key {key} is not found")
                    names.append((key_at(self, key).engine, key_at(self, key).holders))
                    of_key = key_at(self, key).holders
                    set_refs[of_key] = set_refs.get(of_key, 0) + 1
                    keys_seen += 1
                    key_refs += 1
                    require(keys_seen <= self.key_live, f"{name}: its keys run in a circle")
                    key = key_at(self, key).next
            require((block.holders == EMPTY_SET) == (block.keys == NO_KEYS), f"{name}: holders without keys, or keys")
            require(len({engine for engine, _ in names}) == len(names), f"{name} has one key twice")
            union = set()
            for engine, of in names:
                holders = &self.sets[<uint32_t>of]
                for k in range(holders.n):
                    union.add(holders.slots[k])
                    if table_find(&self.extra_refs, engine, holders.slots[k]) != ABSENT:
                        extras += 1
            holders = &self.sets[block.holders]
            require(union == {holders.slots[k] for k in range(holders.n)}, f"{name}: holders are not its keys' union")
        for i in range(self.block_end):
            block = block_at(self, i)
            if block.holders != ABSENT:
                counted = block.children & CHILDREN_MASK
                require(counted == children.get(i, 0), f"block {i} has {children.get(i, 0)} children, not {counted}")
                require(counted > 0 or block.keys != NO_KEYS, f"block {i} is held by nobody and has no child")
        require(live == self.block_live == self.own_table.used, f"{live} blocks, {self.block_live} are counted")
        require(keys_seen == self.key_live, f"{keys_seen} keys, {self.key_live} are counted")
        require(key_refs == self.key_table.used, f"{key_refs} names, {self.key_table.used} are in the table")
        require(extras == self.extra_refs.used, f"{self.extra_refs.used} extra references, {extras} have a holder")
        free_count = 0
        i = self.block_free
        while i != ABSENT:
            free_count += 1
            require(block_at(self, i).holders == ABSENT, f"block {i} is in the free list and is not free")
            i = block_at(self, i).parent
        require(free_count + live == self.block_end, "a block is neither free nor live")
        free_count = 0
        i = self.key_free
        while i != ABSENT:
            free_count += 1
            i = key_at(self, i).next
        require(free_count + keys_seen == self.key_end, "a key is neither free nor live")
        return set_refs

    def _names(self, uint64_t engine, uint32_t ref):
        cdef uint64_t mixed = fold(engine ^ self.secret[0], self.secret[1])
        cdef uint64_t i = ((mixed >> 32) * self.key_table.capacity) >> 32
        while self.key_table.slots[i] != EMPTY_REF:
            if self.key_table.slots[i] == ((<uint32_t>mixed & 31) << REF_BITS | ref):
                return True
            i = (i + 1) % self.key_table.capacity
        return False

    def _check_sets(self, dict set_refs):
        cdef uint32_t i, k
        cdef uint64_t hash
        cdef const HolderSet* holders
        live = 0
        for i in range(1, self.set_end):
            holders = &self.sets[i]
            if holders.slots == NULL:
                require(i not in set_refs, f"set {i} is free and named")
                continue
            live += 1
            hash = 0
            for k in range(holders.n):
                hash ^= self.slots[holders.slots[k]].word
                require(self.slots[holders.slots[k]].state != SLOT_FREE, f"set {i} has a slot that is free")
                require(k == 0 or holders.slots[k - 1] < holders.slots[k], f"set {i} is not in order")
            require(hash == holders.hash, f"set {i} has a wrong hash")
            require(table_find(&self.set_table, hash, holders.check) == i, f"set {i} is not found")
            named = set_refs.get(i, 0)
            require(named == holders.refs > 0, f"set {i} is named by {named}, {holders.refs} are counted")
        require(live == self.set_live == self.set_table.used, f"{live} sets, {self.set_live} are counted")

    def _check_slots(self):
        cdef uint32_t i, k
        cdef Block* block
        cdef const HolderSet* holders
        pairs = {}
        blocks = {}
        for i in range(self.block_end):
            block = block_at(self, i)
            if block.holders == ABSENT:
                continue
            holders = &self.sets[block.holders]
            by = set()
            for k in range(holders.n):
                pairs[holders.slots[k]] = pairs.get(holders.slots[k], 0) + 1
                if self.slots[holders.slots[k]].state == SLOT_LIVE:
                    by.add(self.slots[holders.slots[k]].rank)
            for rank in by:
                blocks[rank] = blocks.get(rank, 0) + 1
        live_pairs, dead_pairs = 0, 0
        for i in range(self.slot_end):
            if self.slots[i].state == SLOT_FREE:
                continue
            require(self.slots[i].pairs == pairs.get(i, 0), f"slot {i} is in {pairs.get(i, 0)} holders")
            if self.slots[i].state == SLOT_LIVE:
                live_pairs += pairs.get(i, 0)
                place = self.slots[i].medium * GROUPS + self.slots[i].group
                require(self.ranks[self.slots[i].rank].slot_of[place] == i, f"slot {i} is not its rank's")
            else:
                dead_pairs += pairs.get(i, 0)
        require(live_pairs == self.live_pairs, f"{live_pairs} pairs, {self.live_pairs} are counted")
        require(dead_pairs == self.dead_pairs, f"{dead_pairs} dead pairs, {self.dead_pairs} are counted")
        for i in range(self.rank_end):
            if self.ranks[i].live:
                counted = self.ranks[i].blocks
                require(counted == blocks.get(i, 0), f"rank {i} holds {blocks.get(i, 0)} blocks, not {counted}")

    def _check_orphans(self):
        cdef uint32_t i, at, k
        total = 0
        count = 0
        hashes = 0
        for i in range(self.rank_end):
            if not self.ranks[i].live:
                continue
            listed = 0
            at = self.ranks[i].oldest_orphan
            while at != ABSENT:
                listed += 1
                require(self.orphans[at].rank == i and self.orphans[at].hashes != NULL, f"orphan {at} is not rank {i}'s")
                require(0 < self.orphans[at].kept <= self.orphans[at].count, f"orphan {at} keeps nothing")
                for k in range(self.orphans[at].kept):
                    found = table_find(&self.orphan_hashes, self.orphans[at].hashes[k], i)
                    require(found == at, f"orphan {at} is not found by its hash")
                    hashes += 1
                total += heap_bytes(self.orphans[at].bytes)
                at = self.orphans[at].newer
            require(listed == self.ranks[i].orphans <= ORPHANS_PER_RANK, f"rank {i} has {listed} orphans")
            count += listed
        require(total == self.orphan_bytes <= self.limit_bytes // 16, f"orphans take {total} bytes")
        require(hashes == self.orphan_hashes.used, f"{hashes} hashes of orphans")
        require(self.orphan_work == ABSENT, "an orphan was left in the work list")

    def _check_bytes(self):
        cdef uint64_t total = sizeof(KvIndex) + 3 * heap_bytes(4 * RANKS_AT_MOST) + SCRATCH_KEPT
        cdef uint32_t i
        total += heap_bytes(self.block_chunk_room * sizeof(void*)) + heap_bytes(self.key_chunk_room * sizeof(void*))
        total += self.block_chunk_count * heap_bytes(CHUNK * sizeof(Block))
        total += self.key_chunk_count * heap_bytes(CHUNK * sizeof(Key))
        total += heap_bytes(self.own_table.capacity * 4) + heap_bytes(self.key_table.capacity * 4)
        total += heap_bytes(self.set_room * sizeof(HolderSet)) + heap_bytes(self.slot_room * sizeof(Slot))
        for i in range(self.set_end):
            if self.sets[i].slots != NULL:
                total += heap_bytes(self.sets[i].n * 4)
        total += heap_bytes(self.rank_room * sizeof(Rank)) + heap_bytes(self.rank_room * 4)
        total += heap_bytes(self.orphan_room * sizeof(Orphan)) + self.orphan_bytes
        for capacity in (
            self.set_table.capacity,
            self.extra_refs.capacity,
            self.orphan_parents.capacity,
            self.orphan_hashes.capacity,
        ):
            total += heap_bytes(<uint64_t>capacity * sizeof(TableSlot))
        require(total == self.bytes_used, f"{total} bytes, {self.bytes_used} are counted")
        require(total <= self.limit_bytes, f"{total} bytes are over the limit of {self.limit_bytes}")


cdef inline Block* block_at(KvIndex index, uint32_t i) noexcept nogil:
    return &index.block_chunks[i >> CHUNK_BITS][i & (CHUNK - 1)]


cdef inline Key* key_at(KvIndex index, uint32_t i) noexcept nogil:
    return &index.key_chunks[i >> CHUNK_BITS][i & (CHUNK - 1)]


cdef inline uint64_t home_of(KvIndex index, uint64_t hash, uint64_t capacity) noexcept nogil:
    return ((fold(hash ^ index.secret[0], index.secret[1]) >> 32) * capacity) >> 32


cdef inline uint64_t distance(uint64_t start, uint64_t end, uint64_t capacity) noexcept nogil:
    return end - start if end >= start else end + capacity - start


cdef inline void skip_array_head(Reader* reader) noexcept nogil:
    # Of an array that was read once.
    if reader.p[0] == 0xDD:
        reader.p += 5
    elif reader.p[0] == 0xDC:
        reader.p += 3
    else:
        reader.p += 1


cdef int require(bint holds, str message) except -1:
    # Not `assert`: check() keeps its word under python -O too.
    if not holds:
        raise AssertionError(message)
    return 0
