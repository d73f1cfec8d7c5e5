#include "memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <new>
#include <utility>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(data, bytes) ((void)0)
#define ASAN_UNPOISON_MEMORY_REGION(data, bytes) ((void)0)
#endif

namespace tureen {

namespace {
constexpr size_t HUGE_PAGE = size_t(2) << 20;
constexpr size_t BLOCK = size_t(64) << 20;  // pages that are never touched take no memory
constexpr size_t LINE = 64;
}  // namespace

// Here and in the arena a line follows the last byte. No code may touch it; a checked build finds code that does.
Memory::Memory(size_t bytes, bool huge) : bytes_(bytes) {
    huge = huge && bytes >= HUGE_PAGE;
    size_t alignment = huge ? HUGE_PAGE : LINE;
    if (bytes > SIZE_MAX - alignment) throw std::bad_alloc();
    mapped_ = bytes + alignment;
    base_ = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base_ == MAP_FAILED) {
        base_ = nullptr;
        throw std::bad_alloc();
    }
    uint8_t* begin = static_cast<uint8_t*>(base_);
    data_ = begin + (alignment - reinterpret_cast<size_t>(base_) % alignment) % alignment;
#ifdef MADV_HUGEPAGE
    if (huge) madvise(data_, bytes, MADV_HUGEPAGE);
#endif
    ASAN_POISON_MEMORY_REGION(begin, data_ - begin);
    ASAN_POISON_MEMORY_REGION(data_ + bytes, begin + mapped_ - (data_ + bytes));
}

Memory::~Memory() {
    if (base_ == nullptr) return;
    ASAN_UNPOISON_MEMORY_REGION(base_, mapped_);
    munmap(base_, mapped_);
}

Memory::Memory(Memory&& other) noexcept { *this = std::move(other); }

Memory& Memory::operator=(Memory&& other) noexcept {
    std::swap(base_, other.base_);
    std::swap(mapped_, other.mapped_);
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
}

std::shared_ptr<const uint8_t> map_file(int descriptor, size_t bytes) {
    auto memory = std::make_shared<Memory>(bytes);  // the addresses; no page of it is touched
    void* data = memory->data();
    if (mmap(data, bytes, PROT_READ, MAP_SHARED | MAP_FIXED, descriptor, 0) == MAP_FAILED) throw std::bad_alloc();
#ifdef __linux__
    constexpr int COLLAPSE = 25;  // MADV_COLLAPSE, from Linux 6.1 on; older C libraries do not name it
    madvise(data, bytes / HUGE_PAGE * HUGE_PAGE, COLLAPSE);
#endif
    return {std::move(memory), static_cast<const uint8_t*>(data)};
}

std::shared_ptr<uint8_t> Arena::take(size_t bytes) {
    if (bytes > SIZE_MAX - 2 * LINE) throw std::bad_alloc();
    const size_t taken = (bytes + LINE - 1) / LINE * LINE + LINE;
    std::lock_guard<std::mutex> lock(mutex_);
    std::shared_ptr<Memory> block = block_.lock();
    if (!block || used_ + taken > block->bytes()) {
        block = std::make_shared<Memory>(std::max(taken, BLOCK));
        block_ = block;
        used_ = 0;
        ASAN_POISON_MEMORY_REGION(block->data(), block->bytes());
    }
    uint8_t* data = block->data() + used_;
    used_ += taken;
    ASAN_UNPOISON_MEMORY_REGION(data, bytes);
    return {std::move(block), data};
}

}  // namespace tureen
