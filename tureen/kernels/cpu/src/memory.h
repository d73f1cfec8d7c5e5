// Memory that is aligned, and lies in huge pages where the system has them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>

namespace tureen {

// Zeroed pages straight from the system: pages that are never touched take no memory. Throws std::bad_alloc.
class Memory {
public:
    explicit Memory(size_t bytes, bool huge = true);
    ~Memory();
    Memory(Memory&& other) noexcept;
    Memory& operator=(Memory&& other) noexcept;
    Memory(const Memory&) = delete;

    uint8_t* data() const { return data_; }
    size_t bytes() const { return bytes_; }

private:
    void* base_ = nullptr;
    size_t mapped_ = 0;
    uint8_t* data_ = nullptr;
    size_t bytes_ = 0;
};

// The first bytes of an open file, to be read only. Pages that processes share become huge ones where the system can:
// others cost a third of the speed of products. Throws std::bad_alloc.
std::shared_ptr<const uint8_t> map_file(int descriptor, size_t bytes);

// Memory for many things that live long, in huge pages that they share. A block goes when the last thing in it does.
class Arena {
public:
    // 64-byte aligned zeros. Throws std::bad_alloc. Any thread may call it.
    std::shared_ptr<uint8_t> take(size_t bytes);

private:
    std::mutex mutex_;
    std::weak_ptr<Memory> block_;
    size_t used_ = 0;
};

}  // namespace tureen
