// Which instruction sets this build has and this processor runs.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace tureen {

struct Isa {
    std::string name;
    bool runs;        // on this processor
    bool by_default;  // taken where nothing is named; else it has never run on a processor that has it
};

// All of this build, best first.
std::vector<Isa> isas();

// All that there are for this kind of machine, also those that the compiler did not know, best first: the name, and the
// features that a processor must have, with spaces between.
std::vector<std::pair<std::string, std::string>> needs_of_isas();

}  // namespace tureen
