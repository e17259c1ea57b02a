"""A Python face for the open-addressing table, so that it is tested alone. What it is: open_table.pxd."""

import os

cimport cython
from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport free, malloc


@cython.final
cdef class OpenTable:
    cdef Table table

    def __cinit__(self, size_t capacity=8, *, secret=None):
        if capacity < 4 or capacity & (capacity - 1) or capacity > (1 << 32):
            raise ValueError(f"capacity must be a power of two from 4 to 2**32, not {capacity}")
        self.table.secret[0], self.table.secret[1] = new_secret() if secret is None else secret
        self.move_to(capacity)

    def __dealloc__(self):
        free(self.table.slots)

    cdef int move_to(self, size_t capacity) except -1:
        cdef TableSlot* slots = <TableSlot*>malloc(capacity * sizeof(TableSlot))
        if slots == NULL:
            raise MemoryError
        free(table_adopt(&self.table, slots, capacity))
        return 0

    def __len__(self):
        return self.table.used

    @property
    def capacity(self):
        return self.table.capacity

    def memory_bytes(self):
        return sizeof(OpenTable) + self.table.capacity * sizeof(TableSlot)

    def find(self, uint64_t hash, uint32_t owner):
        cdef uint32_t value = table_find(&self.table, hash, owner)
        return None if value == ABSENT else value

    def put(self, uint64_t hash, uint32_t owner, uint32_t value):
        if value == ABSENT:
            raise ValueError("2**32 - 1 is no value: it marks an empty slot")
        if self.table.used >= table_room(self.table.capacity) and table_find(&self.table, hash, owner) == ABSENT:
            self.move_to(self.table.capacity * 2)
        table_put(&self.table, hash, owner, value)

    def erase(self, uint64_t hash, uint32_t owner):
        return table_erase(&self.table, hash, owner)

    def clear(self):
        table_clear(&self.table)

    def items(self):
        return [
            ((self.table.slots[i].hash, self.table.slots[i].owner), self.table.slots[i].value)
            for i in range(self.table.capacity)
            if self.table.slots[i].value != ABSENT
        ]

    def longest_probe(self):
        cdef size_t mask = self.table.capacity - 1
        cdef size_t i
        longest = 0
        for i in range(self.table.capacity):
            if self.table.slots[i].value != ABSENT:
                home = table_home(&self.table, self.table.slots[i].hash, self.table.slots[i].owner)
                longest = max(longest, ((i - home) & mask) + 1)
        return longest

    def check(self):
        cdef size_t mask = self.table.capacity - 1
        cdef size_t i, j
        cdef size_t found = 0
        for i in range(self.table.capacity):
            if self.table.slots[i].value == ABSENT:
                continue
            found += 1
            j = table_home(&self.table, self.table.slots[i].hash, self.table.slots[i].owner)
            while j != i:
                if self.table.slots[j].value == ABSENT:
                    raise AssertionError(f"slot {j} is empty between slot {i} and the home of its key")
                if (
                    self.table.slots[j].hash == self.table.slots[i].hash
                    and self.table.slots[j].owner == self.table.slots[i].owner
                ):
                    raise AssertionError(f"slots {j} and {i} hold one key")
                j = (j + 1) & mask
        if found != self.table.used:
            raise AssertionError(f"{found} slots are full, {self.table.used} are counted")
        if found > table_room(self.table.capacity):
            raise AssertionError(f"{found} of {self.table.capacity} slots are full, over the bound")


def new_secret():
    return int.from_bytes(os.urandom(8)), int.from_bytes(os.urandom(8)) | 1
