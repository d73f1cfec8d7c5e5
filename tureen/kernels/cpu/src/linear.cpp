// Compiled once for each instruction set; see kernels.h. Integer sums are exact, and the float sums go over the groups
// of inputs in their order, one accumulator for each output.
#include "kernels.h"
#include "unpack.h"

#if defined(VARIANT_avx512)
#include "linear_avx512.h"
#else
#if defined(VARIANT_avx2)
#include "linear_avx2.h"
#elif defined(VARIANT_neon)
#include "linear_neon.h"
#else
#include "linear_portable.h"
#endif
#include "linear_tiles.h"
#endif

namespace tureen {
namespace VARIANT {

extern const LinearKernels linear_kernels;
const LinearKernels linear_kernels{multiply, unpack_row};

}  // namespace VARIANT
}  // namespace tureen
