// Which instruction sets this build has and this processor runs.
#pragma once

#include <string>
#include <vector>

namespace tureen {

struct Isa {
    std::string name;
    bool runs;        // on this processor
    bool by_default;  // taken where nothing is named; else it has never run on a processor that has it
};

// All of this build, best first.
std::vector<Isa> isas();

}  // namespace tureen
