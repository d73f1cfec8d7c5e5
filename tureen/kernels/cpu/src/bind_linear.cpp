// Pool and Matrix; and linear products and row kernels on numpy arrays, for tests.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <optional>
#include <stdexcept>

#include "activations.h"
#include "arrays.h"
#include "bind.h"
#include "kernels.h"
#include "pack.h"

namespace tureen {

namespace {

using MaybeArray = std::optional<AnyArray>;
using FloatArray = nb::ndarray<nb::numpy, float>;

std::shared_ptr<PackedMatrix> pack_array(Pool& pool, const AnyArray& stored, const std::string& encoding,
                                         const std::string& format, int rows, int cols, const MaybeArray& row_order) {
    const uint8_t* bytes = checked<const uint8_t>(stored, "stored", {ANY});
    const int64_t* order = row_order ? checked<const int64_t>(*row_order, "row_order", {rows}) : nullptr;
    nb::gil_scoped_release release;
    return pack(pool, bytes, stored.size(), encoding, format_named(format.c_str()), rows, cols, order);
}

std::shared_ptr<PackedMatrix> blank_matrix(const std::string& format, int rows, int cols) {
    return blank(format_named(format.c_str()), rows, cols);
}

std::shared_ptr<PackedMatrix> matrix_over(const AnyArray& data, const std::string& format, int rows, int cols) {
    auto packed = std::make_shared<PackedMatrix>(PackedMatrix{layout_of(format_named(format.c_str()), rows, cols), {}});
    auto* bytes = const_cast<uint8_t*>(checked<const uint8_t>(data, "data", {int64_t(packed->bytes())}));
    if (reinterpret_cast<uintptr_t>(bytes) % 64) throw nb::value_error("data does not begin at a multiple of 64 bytes");
    packed->memory = std::shared_ptr<uint8_t>(bytes, [data](uint8_t*) {});  // the matrix keeps the array
    packed->matrix.data = bytes;
    return packed;
}

nb::ndarray<nb::numpy, nb::ro, uint8_t> map_descriptor(int descriptor, size_t bytes) {
    auto* mapped = new std::shared_ptr<const uint8_t>(map_file(descriptor, bytes));
    nb::capsule owner(mapped, [](void* p) noexcept { delete static_cast<std::shared_ptr<const uint8_t>*>(p); });
    return nb::ndarray<nb::numpy, nb::ro, uint8_t>(mapped->get(), {bytes}, owner);
}

const char* name_of_inputs(Inputs inputs) {
    switch (inputs) {
        case Inputs::F32: return "float32";
        case Inputs::BF16: return "bfloat16";
        case Inputs::INT8_GROUP: return "int8";
        default: return "int16";
    }
}

void widen(PackedMatrix& packed) {
    if (packed.matrix.inputs == Inputs::INT8_GROUP) packed.matrix.inputs = Inputs::INT16_GROUP;
}

nb::ndarray<nb::numpy, uint8_t> packed_data(const PackedMatrix& packed) {
    return nb::ndarray<nb::numpy, uint8_t>(packed.memory.get(), {packed.bytes()});  // the array keeps the matrix
}

FloatArray unpack_matrix(const PackedMatrix& packed) {
    const Matrix& matrix = packed.matrix;
    float* out;
    auto array = make_array<float>({size_t(matrix.rows), size_t(matrix.cols)}, &out);
    nb::gil_scoped_release release;
    for (int row = 0; row < matrix.rows; row++) {
        kernels().linear->unpack_row(matrix, row, out + size_t(row) * size_t(matrix.cols));
    }
    return array;
}

const float* checked_bias(const MaybeArray& bias, int rows) {
    return bias ? checked<const float>(*bias, "bias", {rows}) : nullptr;
}

ActivationBuffer quantized(const float* x, int rows, int cols, Inputs kind) {
    ActivationBuffer buffer(kind, cols);
    buffer.reserve(rows);
    Activations view = buffer.view(rows);
    for (int m = 0; m < rows; m++) kernels().rows->quantize(x + size_t(m) * size_t(cols), cols, view, m);
    return buffer;
}

// A thread's part of [0, count).
struct Share {
    int begin, end;

    Share(int64_t count, int thread, int threads)
        : begin(int(count * thread / threads)), end(int(count * (thread + 1) / threads)) {}
};

// Rows as `multiply` takes them: quantized by all threads, or as they lie where a matrix of floats takes them so.
class SharedInputs {
public:
    SharedInputs(Pool& pool, const float* x, int rows, const Matrix& w) {
        if (w.inputs == Inputs::F32 && w.cols == w.padded_cols) {
            view_.kind = Inputs::F32;
            view_.rows = rows;
            view_.cols = view_.stride = w.cols;
            view_.f32 = const_cast<float*>(x);
            return;
        }
        thread_local ActivationBuffer kept(w.inputs, w.cols);  // for new memory costs more than a small product
        const bool is_large = int64_t(rows) * w.cols > MOST_KEPT;
        ActivationBuffer& buffer = is_large ? large_.emplace(w.inputs, w.cols) : kept;
        buffer.become(w.inputs, w.cols);
        buffer.reserve(rows);
        view_ = buffer.view(rows);
        pool.run([&](int thread) {
            Share own(rows, thread, pool.threads());
            for (int m = own.begin; m < own.end; m++)
                kernels().rows->quantize(x + size_t(m) * size_t(w.cols), w.cols, view_, m);
        });
    }

    const Activations& view() const { return view_; }

private:
    static constexpr int64_t MOST_KEPT = 1 << 22;  // inputs in memory that a thread keeps

    std::optional<ActivationBuffer> large_;
    Activations view_{};
};

FloatArray linear(Pool& pool, const AnyArray& x, const PackedMatrix& packed, const MaybeArray& bias,
                  const std::optional<FloatArray>& given, bool add) {
    const Matrix& w = packed.matrix;
    const float* inputs = checked<const float>(x, "x", {ANY, w.cols});
    const float* added = checked_bias(bias, w.rows);
    int rows = int(x.shape(0));
    float* out;
    FloatArray array = given ? *given : make_array<float>({x.shape(0), size_t(w.rows)}, &out);
    if (given) out = checked<float>(array, "out", {rows, w.rows});
    if (add && !given) throw nb::value_error("there is no out to add to");
    nb::gil_scoped_release release;
    SharedInputs shared(pool, inputs, rows, w);
    pool.run([&](int thread) {
        // Tiles are shared; where they are too few, rows.
        bool by_tile = w.tiles >= pool.threads();
        Share own(by_tile ? w.tiles : rows, thread, pool.threads());
        kernels().linear->multiply(w, shared.view(), by_tile ? 0 : own.begin, by_tile ? rows : own.end,
                                   by_tile ? own.begin : 0, by_tile ? own.end : w.tiles, out, size_t(w.rows), add,
                                   added);
    });
    return array;
}

struct Range {
    int begin, end;
};

Range checked_range(const char* name, const nb::tuple& range, int limit) {
    if (range.size() != 2) throw nb::value_error((std::string(name) + " is not a pair").c_str());
    Range given{nb::cast<int>(range[0]), nb::cast<int>(range[1])};
    if (given.begin < 0 || given.begin > given.end || given.end > limit) {
        throw nb::value_error((std::string(name) + " is not within 0 and " + std::to_string(limit)).c_str());
    }
    return given;
}

void linear_range(const AnyArray& x, const PackedMatrix& packed, const WritableArray& out, const nb::tuple& m_range,
                  const nb::tuple& tile_range, bool add, const MaybeArray& bias) {
    const Matrix& w = packed.matrix;
    const float* inputs = checked<const float>(x, "x", {ANY, w.cols});
    int rows = int(x.shape(0));
    float* to = checked<float>(out, "out", {rows, w.rows});
    const float* added = checked_bias(bias, w.rows);
    Range m = checked_range("m_range", m_range, rows), tiles = checked_range("tile_range", tile_range, w.tiles);
    nb::gil_scoped_release release;
    ActivationBuffer buffer = quantized(inputs, rows, w.cols, w.inputs);
    kernels().linear->multiply(w, buffer.view(rows), m.begin, m.end, tiles.begin, tiles.end, to, size_t(w.rows), add,
                               added);
}

template <class T>
nb::ndarray<nb::numpy, T> copied(const T* from, size_t rows, size_t cols) {
    T* to;
    auto array = make_array<T>({rows, cols}, &to);
    std::memcpy(to, from, rows * cols * sizeof(T));
    return array;
}

nb::dict quantize(const AnyArray& x, const std::string& kind) {
    const float* inputs = checked<const float>(x, "x", {ANY, ANY});
    static const std::pair<const char*, Inputs> KINDS[] = {{"F32", Inputs::F32},
                                                           {"BF16", Inputs::BF16},
                                                           {"INT8_GROUP", Inputs::INT8_GROUP},
                                                           {"INT16_GROUP", Inputs::INT16_GROUP},
                                                           {"WORDS", Inputs::WORDS}};
    const Inputs* wanted = nullptr;
    for (const auto& known : KINDS) wanted = kind == known.first ? &known.second : wanted;
    if (wanted == nullptr) throw nb::value_error("kind is none of F32, BF16, INT8_GROUP, INT16_GROUP, WORDS");
    size_t rows = x.shape(0);
    ActivationBuffer buffer = quantized(inputs, int(rows), int(x.shape(1)), *wanted);
    Activations view = buffer.view(int(rows));
    size_t stride = size_t(view.stride);
    nb::dict arrays;
    if (view.kind == Inputs::F32) {
        arrays["f32"] = copied(view.f32, rows, stride);
    } else if (view.kind == Inputs::BF16) {
        arrays["bf16"] = copied(view.bf16, rows, stride);
    } else if (view.kind == Inputs::WORDS) {
        arrays["words"] = copied(view.words, rows, stride);
        arrays["scale"] = copied(view.scale, rows, stride / SPAN);
    } else {
        rows *= size_t(input_rows(view.kind));
        arrays["q"] = copied(view.q, rows, stride);
        arrays["scale"] = copied(view.scale, rows, stride / GROUP);
        arrays["scaled_sum"] = copied(view.scaled_sum, rows, stride / GROUP);
        arrays["sum"] = copied(view.sum, rows, stride / GROUP);
        arrays["half_sum"] = copied(view.half_sum, rows, stride / (GROUP / 2));
    }
    return arrays;
}

// body(row index, row of the result) for every row of the new array [rows of x, cols of x].
template <class Body>
FloatArray by_row(const AnyArray& x, Body body) {
    float* out;
    auto array = make_array<float>({x.shape(0), x.shape(1)}, &out);
    for (size_t row = 0; row < x.shape(0); row++) body(row, out + row * x.shape(1));
    return array;
}

using Product = void (*)(const float* gate, const float* up, int cols, float* out);

FloatArray gated(Product product, const AnyArray& gate, const AnyArray& up) {
    const float* gates = checked<const float>(gate, "gate", {ANY, ANY});
    size_t cols = gate.shape(1);
    const float* ups = checked<const float>(up, "up", {int64_t(gate.shape(0)), int64_t(cols)});
    return by_row(gate, [&](size_t row, float* out) { product(gates + row * cols, ups + row * cols, int(cols), out); });
}

FloatArray add(const AnyArray& x, const AnyArray& y) {
    const float* xs = checked<const float>(x, "x", {ANY, ANY});
    size_t cols = x.shape(1);
    const float* ys = checked<const float>(y, "y", {int64_t(x.shape(0)), int64_t(cols)});
    return by_row(x, [&](size_t row, float* out) {
        std::memcpy(out, ys + row * cols, cols * sizeof(float));
        kernels().rows->add(xs + row * cols, int(cols), 1.0f, out);
    });
}

FloatArray rotate(const AnyArray& x, const AnyArray& cos, const AnyArray& sin) {
    const float* xs = checked<const float>(x, "x", {ANY, ANY});
    size_t head_dim = x.shape(1);
    int64_t rows = int64_t(x.shape(0)), pairs = int64_t(head_dim / 2);
    const float* cosines = checked<const float>(cos, "cos", {rows, pairs});
    const float* sines = checked<const float>(sin, "sin", {rows, pairs});
    return by_row(x, [&](size_t row, float* out) {
        std::memcpy(out, xs + row * head_dim, head_dim * sizeof(float));
        kernels().rows->rotate(out, cosines + row * size_t(pairs), sines + row * size_t(pairs), int(head_dim));
    });
}

FloatArray spread(const AnyArray& x, bool is_query) {
    const float* xs = checked<const float>(x, "x", {ANY, ANY});
    size_t head_dim = x.shape(1);
    return by_row(x, [&](size_t row, float* out) {
        std::memcpy(out, xs + row * head_dim, head_dim * sizeof(float));
        kernels().rows->spread(out, int(head_dim), is_query);
    });
}

void bind_classes(nb::module_& m) {
    nb::class_<Pool>(m, "Pool",
                     "Threads that share the work of a call, the calling one among them. For one call at a time.")
        .def(nb::init<int, bool>(), nb::arg("threads"), nb::arg("adapts") = false)
        .def_prop_ro("threads", &Pool::threads);
    nb::class_<PackedMatrix>(m, "Matrix", "Weights [rows, cols] laid out for the kernels.")
        .def_static(
            "pack", &pack_array, nb::arg("pool"), nb::arg("stored"), nb::arg("encoding"), nb::arg("format"),
            nb::arg("rows"), nb::arg("cols"), nb::arg("row_order") = nb::none(),
            "stored uint8 [bytes]: rows in a GGUF encoding. row_order int64 [rows]: the stored row of each. Raises "
            "ValueError.")
        .def_static("blank", &blank_matrix, nb::arg("format"), nb::arg("rows"), nb::arg("cols"),
                    "Of zeros, to be filled through `data`. Raises ValueError.")
        .def_static("over", &matrix_over, nb::arg("data"), nb::arg("format"), nb::arg("rows"), nb::arg("cols"),
                    "The matrix whose packed bytes are data uint8 [bytes], which is not copied. Raises ValueError.")
        .def_prop_ro("data", &packed_data, "The packed bytes, uint8 [nbytes]: not a copy.")
        .def("unpack", &unpack_matrix, "Values, float32 [rows, cols].")
        .def("widen", &widen, "From now on, multiply integers with inputs of 16 bits in place of 8.")
        .def_prop_ro("rows", [](const PackedMatrix& w) { return w.matrix.rows; })
        .def_prop_ro("cols", [](const PackedMatrix& w) { return w.matrix.cols; })
        .def_prop_ro(
            "inputs", [](const PackedMatrix& w) { return name_of_inputs(w.matrix.inputs); },
            "What it is multiplied with.")
        .def_prop_ro("format", [](const PackedMatrix& w) { return name_of(w.matrix.format); })
        .def_prop_ro("nbytes", [](const PackedMatrix& w) { return w.bytes(); });
}

}  // namespace

void bind_linear(nb::module_& m) {
    bind_classes(m);
    m.def(
        "packed_bytes",
        [](const std::string& format, int rows, int cols) {
            Matrix matrix = layout_of(format_named(format.c_str()), rows, cols);
            return size_t(matrix.tiles) * matrix.tile_bytes;
        },
        nb::arg("format"), nb::arg("rows"), nb::arg("cols"), "What a matrix takes once it is packed.");
    m.def("map_file", &map_descriptor, nb::arg("descriptor"), nb::arg("num_bytes"),
          "The first bytes of an open file, uint8 [num_bytes], to be read only; in huge pages where the system can.");
    m.def("linear", &linear, nb::arg("pool"), nb::arg("x"), nb::arg("matrix"), nb::arg("bias") = nb::none(),
          nb::arg("out").noconvert() = nb::none(), nb::arg("add") = false,
          "x float32 [m, cols] -> x @ matrix.T + bias, float32 [m, rows]: into out, where it is given; add: added to "
          "what it has.");
    m.def("linear_range", &linear_range, nb::arg("x"), nb::arg("matrix"), nb::arg("out"), nb::arg("m_range"),
          nb::arg("tile_range"), nb::arg("add") = false, nb::arg("bias") = nb::none(),
          "Rows m_range and columns of tiles tile_range of the product into (add: onto) out float32 [m, rows].");
    m.def("quantize", &quantize, nb::arg("x"), nb::arg("kind"),
          "x float32 [m, cols] -> the arrays of matrix.h's Activations.");
    m.def(
        "silu_mul", [](const AnyArray& gate, const AnyArray& up) { return gated(kernels().rows->silu_mul, gate, up); },
        nb::arg("gate"), nb::arg("up"));
    m.def(
        "gelu_tanh_mul",
        [](const AnyArray& gate, const AnyArray& up) { return gated(kernels().rows->gelu_tanh_mul, gate, up); },
        nb::arg("gate"), nb::arg("up"));
    m.def("add", &add, nb::arg("x"), nb::arg("y"), "x + y, float32 [m, cols].");
    m.def("rotate", &rotate, nb::arg("x"), nb::arg("cos"), nb::arg("sin"),
          "x float32 [m, head_dim] turned by the angles whose cos and sin are [m, head_dim / 2].");
    m.def(
        "spread", &spread, nb::arg("x"), nb::arg("is_query"),
        "x float32 [m, head_dim], each row multiplied by the Hadamard matrix of 8-bit keys; queries are divided by its "
        "number of rows.");
}

}  // namespace tureen
