// JSON texts as guards compare them: by value, and while one of them is still being written.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tureen::guard {

// The code points of a text in UTF-8, surrogates included.
std::vector<uint32_t> code_points(std::string_view text);

// What a JSON string, with its quotes, says, in UTF-8; single surrogates are kept as such.
std::string said(std::string_view text);

// What is equal for equal JSON values, and only for these. Throws TooLarge where they are nested too deep.
std::string comparable(std::string_view text);

// A string, a number, a word or a sign; of a number its value, as far as it is one.
struct Part {
    uint32_t begin, end;
    std::string number;  // empty: it is compared as it is spelled
};

// A text that is whole.
class Whole {
public:
    explicit Whole(std::string_view text_) : text(text_) {}

    // Its parts, found when they are asked for first.
    const std::vector<Part>& parts() const;
    bool has_zero() const;

    std::string text;

private:
    mutable std::vector<Part> parts_;
};

// Whether a text that is being written may become equal to whole ones, however either spells numbers and spaces.
class Becoming {
public:
    explicit Becoming(std::string_view text) : text_(text) {}

    bool can_be(const Whole& other);
    size_t num_read() const { return parts_.size(); }

private:
    bool has_part(size_t index);

    const std::string_view text_;
    std::vector<Part> parts_;  // as far as they were asked for
    size_t read_ = 0;
};

// Whether a number that begins so is zero, whatever digits follow: its exponent has begun.
bool is_zero_for_good(std::string_view text);

}  // namespace tureen::guard
