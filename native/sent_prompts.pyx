"""Prompts that are on their way: sent_prompts.pyi says what for.

Each slot has the list of its prompts. A prompt's hashes are chained, so two prompts that share hash i share all before
it: whether an entry beats the longest one found so far is one comparison, and only where it does is the exact length
searched for, by halving. Asking costs one comparison an entry, so a few hundred entries cost a few microseconds.
"""

cimport cython

from native.block_hash cimport BlockHashes


cdef inline Py_ssize_t shared(BlockHashes one, BlockHashes other, Py_ssize_t known) noexcept nogil:
    """Leading blocks that both have, where `known` of them are known to be shared."""
    cdef Py_ssize_t low = known
    cdef Py_ssize_t high = one.n if one.n < other.n else other.n
    cdef Py_ssize_t middle
    while low < high:
        middle = low + (high - low + 1) // 2
        if one.data[middle - 1] == other.data[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


@cython.final
cdef class SentPrompts:
    cdef dict by_slot  # slot -> list of BlockHashes, in the order of sending
    cdef Py_ssize_t count

    def __cinit__(self):
        self.by_slot = {}
        self.count = 0

    def __len__(self):
        return self.count

    def add(self, int slot, BlockHashes blocks not None):
        cdef list prompts = self.by_slot.get(slot)
        if prompts is None:
            prompts = self.by_slot[slot] = []
        prompts.append(blocks)
        self.count += 1

    def discard(self, int slot, BlockHashes blocks not None):
        cdef list prompts = self.by_slot.get(slot)
        cdef Py_ssize_t at
        if prompts is not None:
            for at in range(len(prompts)):
                if prompts[at] is blocks:
                    del prompts[at]
                    self.count -= 1
                    if not prompts:
                        del self.by_slot[slot]
                    return True
        return False

    def forget(self, int slot):
        cdef list prompts = self.by_slot.pop(slot, None)
        if prompts is not None:
            self.count -= len(prompts)

    def longest(self, int slot, BlockHashes blocks not None, Py_ssize_t at_least=0):
        cdef list prompts = self.by_slot.get(slot)
        cdef Py_ssize_t best = at_least
        cdef BlockHashes other
        if prompts is None or best < 0:
            return at_least
        for other in prompts:
            if best < other.n and best < blocks.n and other.data[best] == blocks.data[best]:
                best = shared(other, blocks, best + 1)
        return best
