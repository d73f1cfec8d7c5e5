// Checks of numpy arrays, and new ones.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <initializer_list>
#include <memory>
#include <string>
#include <utility>

namespace tureen {

namespace nb = nanobind;

using AnyArray = nb::ndarray<nb::ro>;  // read only is enough
using WritableArray = nb::ndarray<>;

constexpr int64_t ANY = -1;  // a size that may be anything

// The data of a C-contiguous array on the CPU of element type T and this shape. Throws TypeError or ValueError with the
// array's name.
template <class T, class Array>
T* checked(const Array& array, const char* name, std::initializer_list<int64_t> shape) {
    using Element = std::remove_const_t<T>;
    if (array.dtype() != nb::dtype<Element>() || array.device_type() != nb::device::cpu::value) {
        throw nb::type_error((std::string(name) + " has another element type than this function takes").c_str());
    }
    bool fits = array.ndim() == shape.size();
    std::string wanted, got;
    size_t axis = 0;
    for (int64_t size : shape) {
        fits = fits && (size == ANY || int64_t(array.shape(axis)) == size);
        wanted += (axis++ ? ", " : "") + (size == ANY ? std::string("any") : std::to_string(size));
    }
    for (size_t i = 0; i < array.ndim(); i++) got += (i ? ", " : "") + std::to_string(array.shape(i));
    if (!fits) throw nb::value_error((std::string(name) + " is [" + got + "], not [" + wanted + "]").c_str());
    int64_t step = 1;
    for (size_t i = array.size() > 0 ? array.ndim() : 0; i-- > 0; step *= int64_t(array.shape(i))) {
        if (array.shape(i) > 1 && array.stride(i) != step) {
            throw nb::value_error((std::string(name) + " is not contiguous").c_str());
        }
    }
    return static_cast<T*>(const_cast<void*>(static_cast<const void*>(array.data())));
}

// A new numpy array, and its data in `data`.
template <class T>
nb::ndarray<nb::numpy, T> make_array(std::initializer_list<size_t> shape, T** data) {
    size_t count = 1;
    for (size_t size : shape) count *= size;
    std::unique_ptr<T[]> owned(new T[count]);
    *data = owned.get();
    nb::capsule owner(owned.get(), [](void* p) noexcept { delete[] static_cast<T*>(p); });
    owned.release();
    return nb::ndarray<nb::numpy, T>(*data, shape, owner);
}

}  // namespace tureen
