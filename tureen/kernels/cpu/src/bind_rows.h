// Rows of logits as bindings take them, tables as they give them, and how rows are shared among threads.
#pragma once

#include <nanobind/ndarray.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <memory>

#include "pool.h"

namespace nb = nanobind;

namespace tureen {

using Logits = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
template <class T>
using Vector = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Tokens = nb::ndarray<const int64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
template <class T>
using Result = nb::ndarray<nb::numpy, T>;

constexpr double WEIGHT_COST = 10.0;  // of a weight, in logits that are searched for the peak
constexpr double SHORT_WORK = 5e5;    // logits searched in some 30 microseconds

// body(i) for i < count, each by one thread. Short work is done here at once: threads may have to be woken for it, and
// the interpreter may be taken by another thread for much longer.
template <class Body>
void share(Pool& pool, int64_t count, double work_each, const Body& body) {
    if (double(count) * work_each < SHORT_WORK) {
        for (int64_t i = 0; i < count; i++) body(i);
        return;
    }
    nb::gil_scoped_release released;
    if (count == 1) {
        body(0);
        return;
    }
    int64_t threads = pool.threads();
    pool.run([&](int thread) {
        for (int64_t i = thread; i < count; i += threads) body(i);
    });
}

template <class T>
class Table {  // an array [rows, columns] that becomes Python's
public:
    Table(size_t rows, size_t columns)
        : rows_(rows), columns_(columns), data_(new T[std::max<size_t>(1, rows * columns)]) {}

    T* operator[](int64_t row) { return data_.get() + size_t(row) * columns_; }

    // [rows, columns]
    Result<T> give() { return give_as({rows_, columns_}); }

    // [rows * columns]
    Result<T> give_column() { return give_as({rows_ * columns_}); }

private:
    Result<T> give_as(std::initializer_list<size_t> shape) {
        T* data = data_.release();
        nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<T*>(p); });
        return Result<T>(data, shape, owner);
    }

    size_t rows_, columns_;
    std::unique_ptr<T[]> data_;
};

inline int width_of(const Logits& logits) {
    if (logits.shape(1) < 1 || logits.shape(1) > INT32_MAX) throw nb::value_error("a row needs 1 to 2^31 - 1 logits");
    return int(logits.shape(1));
}

inline const int64_t* checked_rows(const Logits& logits, const Vector<int64_t>& rows) {
    for (size_t i = 0; i < rows.shape(0); i++) {
        if (rows.data()[i] < 0 || rows.data()[i] >= int64_t(logits.shape(0))) throw nb::index_error("no such row");
    }
    return rows.data();
}

}  // namespace tureen
