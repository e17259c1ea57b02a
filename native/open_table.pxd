"""An open-addressing hash table from (64-bit hash, 32-bit owner) to a 32-bit value.

Linear probing over a power-of-two number of slots. Deletion shifts the slots behind it back, so there are no
tombstones and a table does not age. The table never allocates: its owner hands it memory through table_adopt, and
keeps the load at or below table_room(capacity).

The home slot of a key is a folded 64 x 64 -> 128 bit product with two secret words, so that clients, who choose what
is hashed, cannot choose which keys meet in one slot.
"""

from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memset


cdef extern from *:
    """
    #include <stdint.h>

    #define KVGATE_ABSENT UINT32_MAX

    static inline uint64_t kvgate_fold(uint64_t a, uint64_t b) {
        unsigned __int128 product = (unsigned __int128)a * b;
        return (uint64_t)product ^ (uint64_t)(product >> 64);
    }
    """
    const uint32_t ABSENT "KVGATE_ABSENT"  # no value; marks an empty slot, so it cannot be stored
    uint64_t fold "kvgate_fold"(uint64_t a, uint64_t b) noexcept nogil


cdef struct TableSlot:
    uint64_t hash
    uint32_t owner
    uint32_t value


cdef struct Table:
    TableSlot* slots
    size_t capacity  # a power of two, 0 before the first table_adopt
    size_t used
    uint64_t secret[2]


# The most keys that `capacity` slots, at least 4, may hold: three in four, where a miss still costs 8.5 probes on average.
cdef inline size_t table_room(size_t capacity) noexcept nogil:
    return capacity - capacity // 4


cdef inline size_t table_home(const Table* table, uint64_t hash, uint32_t owner) noexcept nogil:
    return <size_t>fold(hash ^ table.secret[0], table.secret[1] ^ owner) & (table.capacity - 1)


cdef inline uint32_t table_find(const Table* table, uint64_t hash, uint32_t owner) noexcept nogil:
    cdef size_t i = table_home(table, hash, owner)
    cdef const TableSlot* slot = &table.slots[i]
    while slot.value != ABSENT:
        if slot.hash == hash and slot.owner == owner:
            return slot.value
        i = (i + 1) & (table.capacity - 1)
        slot = &table.slots[i]
    return ABSENT


# Sets the key's value, new or not. The caller keeps at least one slot empty.
cdef inline void table_put(Table* table, uint64_t hash, uint32_t owner, uint32_t value) noexcept nogil:
    cdef size_t i = table_home(table, hash, owner)
    while table.slots[i].value != ABSENT:
        if table.slots[i].hash == hash and table.slots[i].owner == owner:
            table.slots[i].value = value
            return
        i = (i + 1) & (table.capacity - 1)
    table.slots[i].hash = hash
    table.slots[i].owner = owner
    table.slots[i].value = value
    table.used += 1


# True where the key was there.
cdef inline bint table_erase(Table* table, uint64_t hash, uint32_t owner) noexcept nogil:
    cdef size_t mask = table.capacity - 1
    cdef size_t hole = table_home(table, hash, owner)
    cdef size_t i, home
    while table.slots[hole].hash != hash or table.slots[hole].owner != owner or table.slots[hole].value == ABSENT:
        if table.slots[hole].value == ABSENT:
            return False
        hole = (hole + 1) & mask
    i = hole
    while True:
        i = (i + 1) & mask
        if table.slots[i].value == ABSENT:
            break
        home = table_home(table, table.slots[i].hash, table.slots[i].owner)
        # A key may fill the hole only if its probe, from its home to where it stands, passes the hole.
        if ((i - home) & mask) >= ((i - hole) & mask):
            table.slots[hole] = table.slots[i]
            hole = i
    table.slots[hole].value = ABSENT
    table.used -= 1
    return True


cdef inline void table_clear(Table* table) noexcept nogil:
    memset(table.slots, 0xFF, table.capacity * sizeof(TableSlot))
    table.used = 0


# Moves all keys to `slots`, of `capacity` slots, more than `used`; returns the old memory, which is the caller's again.
cdef inline TableSlot* table_adopt(Table* table, TableSlot* slots, size_t capacity) noexcept nogil:
    cdef TableSlot* old = table.slots
    cdef size_t old_capacity = table.capacity
    cdef size_t i
    table.slots = slots
    table.capacity = capacity
    table_clear(table)
    for i in range(old_capacity):
        if old[i].value != ABSENT:
            table_put(table, old[i].hash, old[i].owner, old[i].value)
    return old
